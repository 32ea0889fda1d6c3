"""The forecast of what workers will hand in: submissions held by a validator but not judged yet."""

import math
from typing import Literal

from peers.trainer.pool import GroupLabel
from swarm.wire.envelope import EVENT_LIFETIME_SECONDS
from swarm.world.recent import Recent

SMOOTHING = 0.1
"""Weight of the newest submission in the running share of groups kept."""

KEEP_RATE_MIN = 1 / 16
"""Floor of that share: a smaller share would request over sixteen times the work at once."""

UNJUDGED_SECONDS = 60.0
"""Least time after which an announced submission without a verdict leaves the forecast, ..."""
UNJUDGED_FACTOR = 3.0
"""... and how many times the longest recent check it is, if that is more: a check of a large
model's rollouts takes minutes."""
RECENT_SHARE = 0.9
"""Part of the longest recent check that counts at the next verdict."""

JUDGED_SECONDS = EVENT_LIFETIME_SECONDS
"""Time for which a judged submission is remembered, so that a late acknowledgement of it does not
enter the forecast: by then every acknowledgement has expired."""

JUDGED_MAX = 10_000
"""Most of them; the oldest is forgotten."""

WORKERS_MAX = 4096
"""Workers remembered by their last outcome; the least recent is forgotten."""

Outcome = Literal["accepted", "refused", "quarantined"]
Offer = tuple[str, bytes]
"""(worker, digest): a worker's announcement says nothing about another worker's file."""


class KeepRate:
    """A running share of the groups that the filter keeps."""

    def __init__(self) -> None:
        self._average = 0.0
        self._weight = 0.0

    def observe(self, labels: list[GroupLabel]) -> None:
        """Add a submission's groups to the share; continuations do not count."""
        count = len(labels) - labels.count("continuation")
        if not count:
            return
        self._average += SMOOTHING * (labels.count("kept") / count - self._average)
        self._weight += SMOOTHING * (1 - self._weight)

    @property
    def value(self) -> float:
        """The share, in [1/16, 1]; 1 before the first submission."""
        return max(KEEP_RATE_MIN, self._average / self._weight) if self._weight else 1.0


def groups_to_ask_for(missing: int, keep_rate: float, coming: int) -> int:
    """Groups to ask for: `missing` kept ones by `keep_rate`, less those `coming` unjudged."""
    return max(0, math.ceil(missing / keep_rate - 1e-9) - coming)


class Forecast:
    """Submissions held by a validator but not judged yet, and counts since the newest order."""

    def __init__(self) -> None:
        self.keep_rate = KeepRate()
        """Share of accepted groups that the online filter keeps."""
        self._announced: dict[Offer, tuple[int, float]] = {}
        """Groups of each submission held and not yet judged by a validator, and since when."""
        self._late: Recent[Offer, float] = Recent(JUDGED_MAX)
        """Submissions that left the forecast without a verdict, and since when they were in it."""
        self._longest_check_seconds = 0.0
        """The longest recent time from an acknowledgement to the verdict."""
        self._judged: Recent[Offer, float] = Recent(JUDGED_MAX)
        """The last judged submissions, and when: an acknowledgement may come later."""
        self._judged_since_order = 0
        """Verdicts since the newest order or revision."""
        self._wasted_since_order = 0
        """Submissions since then that serve no batch, although they spent their workers' quota."""
        self._wasteful: Recent[str, None] = Recent(WORKERS_MAX)
        """Workers whose last judged submission was refused."""
        self._reliable: Recent[str, None] = Recent(WORKERS_MAX)
        """Workers whose last judged submission was accepted."""

    def announce(self, offer: Offer, groups: int, now: float, *, has_stake: bool) -> bool:
        """Add a submission that a validator holds and that may serve a batch.

        An acknowledgement says only that a file has arrived. So nothing is expected of a worker
        that has neither stake nor an accepted submission, nor of one whose last was refused:
        otherwise, identities that cost nothing would fill the forecast with files of garbage, and
        nobody else would be asked. Returns False for these, and for what was judged already."""
        worker, _ = offer
        if offer in self._judged or worker in self._wasteful:
            return False
        if not has_stake and worker not in self._reliable:
            return False
        self._announced.setdefault(offer, (groups, now))
        return True

    def judge(self, offer: Offer, outcome: Outcome, now: float) -> None:
        """Count a verdict; the submission's groups stay in the forecast until `settle`.

        The refusals of one worker count once until it is accepted again. Otherwise it could have
        more asked of all workers as often as it likes."""
        worker, _ = offer
        _, since = self._announced.get(offer, (0, self._late.pop(offer, now)))
        if offer not in self._judged:
            recent = RECENT_SHARE * self._longest_check_seconds
            self._longest_check_seconds = max(recent, now - since)
        self._judged[offer] = now
        if outcome == "refused" and worker in self._wasteful:
            return
        self._judged_since_order += 1
        self._wasted_since_order += outcome != "accepted"
        if outcome == "refused":
            self._reliable.pop(worker, None)
            self._wasteful[worker] = None
        elif outcome == "accepted":
            self._wasteful.pop(worker, None)
            self._reliable[worker] = None

    def settle(self, offer: Offer) -> None:
        """Remove a submission that is in the pool, or never will be."""
        self._announced.pop(offer, None)

    def waste(self, submissions: int) -> None:
        """Count submissions that serve no batch after all, or not with all of their groups."""
        self._wasted_since_order += submissions

    def forget_late(self, now: float) -> int:
        """Count submissions long unjudged, dropped as wasted; forget those judged long ago."""
        while self._judged and now - next(iter(self._judged.values())) > JUDGED_SECONDS:
            self._judged.popitem(last=False)
        longest = max(UNJUDGED_SECONDS, UNJUDGED_FACTOR * self._longest_check_seconds)
        late = [offer for offer, (_, since) in self._announced.items() if now - since > longest]
        for offer in late:
            _, self._late[offer] = self._announced.pop(offer)
        self.waste(len(late))
        return len(late)

    def forget_announced(self) -> None:
        """Drop all announced submissions: they belong to an abandoned lineage."""
        self._announced.clear()

    def coming(self) -> int:
        """Groups announced and not yet judged."""
        return sum(groups for groups, _ in self._announced.values())

    def order_issued(self) -> None:
        """Restart the counts: workers have new quotas."""
        self._judged_since_order = self._wasted_since_order = 0

    def quota_spent(self, *, refill: bool) -> bool:
        """Whether submissions spent the newest order's quota without filling its batch.

        With `refill`, even an accepted submission may have no group that counts."""
        return self._wasted_since_order + (self._judged_since_order if refill else 0) > 0
