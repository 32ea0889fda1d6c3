"""`swarm eval`: a checkpoint's figures on held-out tasks, with a table against a base."""
