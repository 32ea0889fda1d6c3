"""Rollouts: what workers generate, the file that carries it, and the seeds that fix it."""
