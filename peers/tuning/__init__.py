"""`swarm sft` and `swarm dpo`: fine-tuning on this machine, without a network."""
