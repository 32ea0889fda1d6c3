"""Simulated networks: the production peers in virtual time, reproducibly from one seed.

`clock` runs a trio program in virtual time; `world`, `disk`, `network` (with `flows`) implement
the seam of design §4; `simulation` puts production peers on it; `scenarios` are what
`python -m simnet run` runs. See docs/simulation.md.
"""
