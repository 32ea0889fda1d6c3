"""A peer in the network, the same peer inside a run, and its part as a trusted peer."""
