"""The checks of what may have changed since a submission was acknowledged, asked when it matters:
before it is judged, when its turn comes, and when its verdict takes its position in the log. They
cost nothing, and are stated only when one fails."""

from peers.validator.checks.standing.eviction import NotEvicted
from peers.validator.checks.standing.staleness import Age, Staleness
from peers.validator.checks.standing.turn import InTurn, Turn

WORKER = (NotEvicted(),)
POLICY = (Staleness(),)
TURN = (InTurn(),)

__all__ = ["POLICY", "TURN", "WORKER", "Age", "Turn"]
