"""The trainer: opens steps, collects accepted rollouts, learns from them, publishes policies.

`role.py` runs each step in the network process, which imports no torch. `collector.py` fills the
pool, `orders.py` opens steps, `batches.py` waits for a batch, `publishing.py` announces policies,
and `child.py` calls the child process. `service.py` implements that child; its learning code is in
`learning/` (start with `step.py`). Three more tools share the room: `tuning.py` fine-tunes
(`swarm sft`), `dataset.py` measures tasks (`swarm dataset filter`), and `warmup.py` makes the
demo's base policy.
"""
