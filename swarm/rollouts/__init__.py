"""Rollouts: their data structures, the submission file, and the seeds that determine them."""
