"""`swarm sft`: fine-tuning on this machine, without a network."""
