"""Simulated networks: the production peers in virtual time, reproducibly from one seed.

`clock` runs a trio program in virtual time. `world`, `disk`, `compute` and `network` (with `flows`)
implement the seam to the machine, and `simulation` runs production peers on it. `python -m simnet
run` runs the `scenarios`. See docs/simulation.md.
"""
