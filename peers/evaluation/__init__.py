"""Measuring a checkpoint on tasks that no training draws, apart from any run."""
