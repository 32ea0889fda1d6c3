"""`swarm train`: pre-training or fine-tuning in rounds, alone or with others by a library."""
