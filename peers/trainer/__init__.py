"""The trainer: opens steps, collects accepted rollouts, learns from them, publishes policies.

`role.py` tells the story of a step on the network side, which imports no torch: `collector.py`
fills the pool, `orders.py` opens steps, `batches.py` waits for a batch, `publishing.py` announces
policies, `child.py` calls the child process. `service.py` is that child, and `learning/` is what it
learns with, from `step.py` on. Beside it: `supervised.py` fine-tunes (`swarm sft`), `dataset.py`
measures tasks (`swarm dataset filter`), `warmup.py` makes the demo's base policy.
"""
