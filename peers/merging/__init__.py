"""Merging checkpoints of one architecture into one: `swarm checkpoint merge`."""
