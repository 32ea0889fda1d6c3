"""The trainer: GRPO, the learner that takes the steps, and the service a child process runs.

`role.py` is the network side and imports no torch; everything else here does.
"""
