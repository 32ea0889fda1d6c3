"""Token buckets: how much somebody may do now, and how long to wait before more.

Pure arithmetic on times that the caller gives, so that it works on any clock.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf


class TokenBucket:
    """Holds at most `burst` tokens, gains `per_second`, and begins full."""

    __slots__ = ("_as_of", "_burst", "_per_second", "_tokens")

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = burst
        self._as_of = -inf

    def take(self, cost: float, now: float) -> bool:
        """Take `cost` tokens if the bucket holds them; False, and none taken, if not."""
        self._refill(now)
        if self._tokens < cost:
            return False
        self._tokens -= cost
        return True

    def borrow(self, cost: float, now: float) -> None:
        """Take `cost` tokens in any case, into debt if need be."""
        self._refill(now)
        self._tokens -= cost

    def debt_seconds(self, now: float) -> float:
        """The time until the bucket is out of debt; 0 if it has none."""
        self._refill(now)
        return max(0.0, -self._tokens / self._per_second)

    def give_back(self, cost: float) -> None:
        """Return tokens that were taken and not used."""
        self._tokens += cost

    def _refill(self, now: float) -> None:
        earned = (now - self._as_of) * self._per_second
        self._tokens = min(self._burst, self._tokens + earned)
        self._as_of = now


class TokenBuckets:
    """One bucket per name, for at most `names_max` names; forgets the least recently used."""

    def __init__(self, per_second: float, burst: float, names_max: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._names_max = names_max
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def of(self, name: str) -> TokenBucket:
        """The bucket of `name`; a new one, full, if it is not remembered."""
        bucket = self._buckets.get(name)
        if bucket is not None:
            self._buckets.move_to_end(name)
            return bucket
        bucket = self._buckets[name] = TokenBucket(self._per_second, self._burst)
        if len(self._buckets) > self._names_max:
            self._buckets.popitem(last=False)
        return bucket
