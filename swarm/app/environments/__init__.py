"""The commands `swarm environment`: write, check and try an environment."""
