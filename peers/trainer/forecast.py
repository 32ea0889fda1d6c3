"""Which groups are on their way without a new step order, and what the newest order has brought."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from peers.trainer.filters import KeepRate

UNJUDGED_SECONDS = 60.0
"""An announced submission without a verdict leaves the forecast after this."""

JUDGED_MAX = 10_000
"""Judged submissions remembered, so that a late acknowledgement is not waited for."""

Offer = tuple[str, bytes]
"""Worker and digest: a worker's announcement says nothing about another worker's file."""


@dataclass
class _Announced:
    """A submission that a validator has, and that waits for its verdict."""

    groups: int
    since: float


class Forecast:
    """Submissions that a validator holds and has not judged, and counts since the newest order."""

    def __init__(self) -> None:
        self.keep_rate = KeepRate()
        """Share of accepted groups that the online filter keeps."""
        self._announced: dict[Offer, _Announced] = {}
        self._judged: OrderedDict[Offer, None] = OrderedDict()
        """The last ones judged: their acknowledgement may come after the verdict."""
        self._judged_since_order = 0
        """Verdicts since the newest order or revision."""
        self._wasted_since_order = 0
        """Submissions since then that serve no batch: their workers' quota is spent."""

    def announce(self, offer: Offer, groups: int, now: float) -> bool:
        """A validator holds a submission; False if it was judged already."""
        if offer in self._judged:
            return False
        self._announced.setdefault(offer, _Announced(groups, now))
        return True

    def judge(self, offer: Offer, *, accepted: bool) -> None:
        """A verdict arrived; the submission's groups stay in the forecast until `settle`."""
        self._judged[offer] = None
        self._judged_since_order += 1
        self._wasted_since_order += not accepted
        if len(self._judged) > JUDGED_MAX:
            self._judged.popitem(last=False)

    def settle(self, offer: Offer) -> None:
        """A submission is in the pool, or never will be."""
        self._announced.pop(offer, None)

    def waste(self, submissions: int) -> None:
        """Submissions serve no batch after all."""
        self._wasted_since_order += submissions

    def forget_late(self, now: float) -> int:
        """Drop what no validator has judged for long, as wasted; how many submissions."""
        late = [
            offer
            for offer, announced in self._announced.items()
            if now - announced.since > UNJUDGED_SECONDS
        ]
        for offer in late:
            del self._announced[offer]
        self.waste(len(late))
        return len(late)

    def forget_announced(self) -> None:
        """Drop all announced submissions: they are of a lineage given up."""
        self._announced.clear()

    def coming(self) -> int:
        """Groups announced and not yet judged."""
        return sum(each.groups for each in self._announced.values())

    def order_issued(self) -> None:
        """Count from here: workers have new quotas."""
        self._judged_since_order = self._wasted_since_order = 0

    def quota_spent(self, *, refill: bool) -> bool:
        """Whether quota of the newest order was spent without filling its batch.

        With `refill` an accepted submission may fill nothing either.
        """
        return self._wasted_since_order + (self._judged_since_order if refill else 0) > 0
