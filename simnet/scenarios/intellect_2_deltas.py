"""INTELLECT-2 once more, with checkpoints published as deltas as well.

At its learning rate of 3e-7 a delta over the eight optimiser steps of a rollout step is a 66th of
the checkpoint (`python -m benchmarks.delta`). The rest is as in [intellect-2](intellect_2.py)."""

import dataclasses

from simnet.scenarios import intellect_2
from simnet.scenarios.intellect_2 import PEERS, PEERS_MIN, run

WORKLOAD = dataclasses.replace(intellect_2.WORKLOAD, delta_share=1 / 66)

__all__ = ["PEERS", "PEERS_MIN", "WORKLOAD", "run"]
