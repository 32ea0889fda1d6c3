"""`python -m peers.trainer.follower`: a trainer's rank above 0."""

from __future__ import annotations

import sys

from peers.learning.follower import run

if __name__ == "__main__":
    sys.exit(run("peers.trainer.service:TrainerService"))
