"""A peer in the network, and its part in a run."""
