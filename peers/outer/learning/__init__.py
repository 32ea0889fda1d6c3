"""What a trainer of several computes: inner steps, pseudo-gradients, and their merge."""
