"""Learning: one policy, its optimiser, and the GRPO step that improves it, on one rank or many."""
