"""Learning: one policy, its optimiser, and the GRPO step that improves it, on one rank or many.

Trainer, replica, `swarm sft`, `swarm dpo` and `swarm train` use it alike.
"""
