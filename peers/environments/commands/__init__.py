"""`swarm environment`: write, check, install and try environments."""
