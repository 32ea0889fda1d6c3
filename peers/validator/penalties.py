"""What each worker wasted of this validator's time lately, and the pauses that this costs it.

Waste is a submission that was refused, by any validator, or whose check ended child processes here,
and a file that was not delivered. A crash proves nothing, but settles the number, so it must not be
free. The first few cost nothing; each further one doubles the pause."""

import math
from dataclasses import dataclass

from swarm.run.heard_verdicts import verdict_in
from swarm.transport.rates import TokenBucket, TokenBuckets
from swarm.wire.envelope import Envelope
from swarm.world import World
from swarm.world.recent import Recent

NO_WASTE = ("stale", "admission")
"""Checks that fail for reasons that say nothing of the submission."""
FORGIVEN = 1 / 16
"""Part of a waste that an accepted submission makes up for. If it were a whole one, a worker could
replace every other draw that it dislikes by a file that cannot be read."""
WASTES_FREE = 3
"""Wastes that cost no pause."""
PAUSE_SECONDS_MIN = 4.0
"""Length of the first pause; each further one is twice as long."""
PAUSE_SECONDS_MAX = 600.0
WASTES_KEPT_SECONDS = 3600.0
"""A worker that wasted nothing for so long begins anew."""
WORKERS_REMEMBERED_MAX = 4096
"""Workers whose wastes are remembered; the least recent is forgotten."""

REFUSALS_PER_SECOND = 0.2
"""Average number of refusals per second that one identity is sent."""
REFUSALS_BURST = 32.0
"""Number of refusals that one identity may be sent at once. Further announcements that would be
refused get no answer, because each answer costs a signature."""
STRANGERS_REFUSALS_PER_SECOND = 10.0
STRANGERS_REFUSALS_BURST = 200.0
"""The same for all identities without an admission together, because those cost nothing."""


@dataclass
class _Wastes:
    count: float = 0.0
    last: float = 0.0
    """Wall time of the last one, in seconds."""
    paused_until: float = 0.0


class Penalties:
    """Counts wastes and rations refusals, in wall times: a restart finds the same in its log."""

    def __init__(self, world: World, here: str) -> None:
        """`here` is this validator's id."""
        self._world = world
        self._here = here
        self._wastes: Recent[str, _Wastes] = Recent(WORKERS_REMEMBERED_MAX)
        self._refusals = TokenBuckets(REFUSALS_PER_SECOND, REFUSALS_BURST, WORKERS_REMEMBERED_MAX)
        self._strangers = TokenBucket(STRANGERS_REFUSALS_PER_SECOND, STRANGERS_REFUSALS_BURST)

    def hear(self, envelope: Envelope) -> None:
        """Take note of any validator's verdict."""
        verdict = verdict_in(envelope)
        refused = verdict.outcome == "refused" and verdict.failed not in NO_WASTE
        crashed = verdict.failed == "crash" and envelope.sender == self._here
        if refused or crashed:
            self.waste(verdict.worker, envelope.body.issued_ms / 1000)
        elif verdict.outcome == "accepted" and verdict.worker in self._wastes:
            wastes = self._wastes[verdict.worker]
            wastes.count = max(0.0, wastes.count - FORGIVEN)

    def waste(self, worker: str, when: float | None = None) -> None:
        """Count a waste at the wall time `when`; None: now."""
        now = self._world.wall_time()
        when = now if when is None else min(when, now)
        wastes = self._wastes.of(worker, _Wastes)
        if when - wastes.last > WASTES_KEPT_SECONDS:
            wastes.count = 0
        wastes.count += 1
        wastes.last = max(wastes.last, when)
        if wastes.count > WASTES_FREE:
            doubled = PAUSE_SECONDS_MIN * 2 ** min(math.ceil(wastes.count) - WASTES_FREE - 1, 20)
            wastes.paused_until = max(wastes.paused_until, when + min(PAUSE_SECONDS_MAX, doubled))

    def pause_seconds(self, worker: str) -> float:
        """How long nothing of a worker is accepted yet; 0 if it is not paused."""
        wastes = self._wastes.get(worker)
        return 0.0 if wastes is None else max(0.0, wastes.paused_until - self._world.wall_time())

    def may_refuse(self, worker: str, *, stranger: bool = False) -> bool:
        """Whether a worker may be sent a refusal. Beyond its quota it gets no answer."""
        now = self._world.now()
        if not self._refusals.of(worker).take(1, now):
            return False
        return not stranger or self._strangers.take(1, now)
