"""Peers behind real NATs, in network namespaces: `python -m tests.nat` prints the matrix."""
