"""A peer in the network, and the same peer inside a run."""
