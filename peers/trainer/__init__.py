"""The trainer: opens steps, collects accepted rollouts, learns from them, publishes policies.

`role.py` runs each step in the network process, which imports no torch. `collector.py` fills the
`pool.py`, `orders.py` opens steps, `steps.py` waits for a batch and trains on it, `publishing.py`
announces policies, `saving.py` and `resuming.py` write training states and continue from them, and
`child.py` calls the child process. `service.py` implements that child; its learning code is in
`peers/learning` (start with `step.py`).
"""
