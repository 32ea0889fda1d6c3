"""When a round closes, and who closes it.

The trainers are ranked by rendezvous hash of run and round. The first that is present signs the
round's record once a quorum and the grace window are over; each further one waits a while longer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.rollouts.seeds import rendezvous
from swarm.wire.manifest import Outer

TAKEOVER_SECONDS = 15.0
"""How much longer than the trainer before it in rank a trainer waits for a record: enough for a
signature, a write to disk, and gossip across the world."""


def ranking(trainers: Sequence[str], run: str, round: int) -> list[str]:
    """Trainers in the order in which they may close a round."""
    return rendezvous(trainers, b"outer", run.encode(), round.to_bytes(8, "big"))


@dataclass(frozen=True)
class Gathered:
    """What a trainer knows of the round that is to be closed. Times are in the world's seconds."""

    ready: dict[str, float]
    """When the contribution of each trainer from the newest outer state was complete and checked
    here. A late contribution from an older state joins the record, but nobody waits for it."""
    present: Collection[str]
    """Trainers that can be waited for, this one included."""
    began: float
    """When this trainer got the outer state that the round begins from."""

    def missing(self) -> list[str]:
        """Trainers that are present and have not contributed."""
        return sorted(set(self.present) - set(self.ready))

    def quorum(self, outer: Outer) -> int:
        """Contributions that the round needs."""
        return max(1, min(outer.quorum, len(self.present)))

    def due_at(self, outer: Outer) -> float:
        """When the round closes, as far as is known now; infinite without such a contribution."""
        if not self.ready:
            return math.inf
        times = sorted(self.ready.values())
        if not self.missing():
            return times[-1]
        deadline = max(times[0], self.began + outer.deadline_seconds)
        quorum = self.quorum(outer)
        if len(times) < quorum:
            return deadline
        return min(deadline, times[quorum - 1] + outer.grace_seconds)

    def closes_at(self, outer: Outer, ranked: Sequence[str], own: str) -> float:
        """When this trainer closes the round unless another one has."""
        before = [trainer for trainer in ranked if trainer in self.present]
        rank = before.index(own) if own in before else len(before)
        return self.due_at(outer) + rank * TAKEOVER_SECONDS
