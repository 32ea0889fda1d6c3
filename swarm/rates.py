"""Token buckets: rate limits with bursts.

They only compute with times that the caller gives, so that they work with any clock.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf


class TokenBucket:
    """A bucket of at most `burst` tokens that gains `per_second` and starts full."""

    __slots__ = ("_as_of", "_burst", "_per_second", "_tokens")

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = burst
        self._as_of = -inf

    def take(self, cost: float, now: float) -> bool:
        """Take `cost` tokens if the bucket holds them; otherwise take none and return False."""
        self._refill(now)
        if self._tokens < cost:
            return False
        self._tokens -= cost
        return True

    def borrow(self, cost: float, now: float) -> None:
        """Take `cost` tokens, into debt if needed."""
        self._refill(now)
        self._tokens -= cost

    def debt_seconds(self, now: float) -> float:
        """Return the time until the bucket is out of debt; 0 if it has none."""
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
        """Return the bucket of `name`; a new, full one if the name is not remembered."""
        bucket = self._buckets.get(name)
        if bucket is not None:
            self._buckets.move_to_end(name)
            return bucket
        bucket = self._buckets[name] = TokenBucket(self._per_second, self._burst)
        if len(self._buckets) > self._names_max:
            self._buckets.popitem(last=False)
        return bucket
