"""The checks of conditions that may change after a submission's acknowledgement.

They run before the submission is judged, when its turn comes, and when its verdict enters the log.
They cost nothing, and a verdict lists one only if it fails.
"""

from peers.validator.checks.standing.eviction import NotEvicted
from peers.validator.checks.standing.staleness import Age, Staleness
from peers.validator.checks.standing.turn import InTurn, Turn

WORKER = (NotEvicted(),)
POLICY = (Staleness(),)
TURN = (InTurn(),)

__all__ = ["POLICY", "TURN", "WORKER", "Age", "Turn"]
