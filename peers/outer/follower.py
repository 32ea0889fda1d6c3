"""`python -m peers.outer.follower`: a rank above 0 of one of several trainers."""

import sys

from peers.trainer.follower import run

if __name__ == "__main__":
    sys.exit(run("peers.outer.learning.service:ReplicaService"))
