"""The trainer: opens steps, collects accepted rollouts, learns from them, publishes policies.

`role.py` is the network side and imports no torch; `service.py` is the child process that does,
and `learning/` is what it calls: the learner and the GRPO step.
"""
