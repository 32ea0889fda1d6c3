"""Token buckets: rate limits with bursts."""

from dataclasses import dataclass
from math import inf

import trio

from swarm.world.recent import Recent

HOUR = 3600.0

NETWORKS_MAX = 1024
"""Networks whose budgets are remembered."""


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

    async def spend(self, cost: float) -> None:
        """Take `cost` tokens by trio's clock and wait out the debt: a flood slows itself."""
        now = trio.current_time()
        self.borrow(cost, now)
        if seconds := self.debt_seconds(now):
            await trio.sleep(seconds)

    def debt_seconds(self, now: float) -> float:
        """Return the time until the bucket is out of debt; 0 if it has none."""
        self._refill(now)
        return max(0.0, -self._tokens / self._per_second)

    def left(self, now: float) -> float:
        """Return the number of tokens; below 0 in debt."""
        self._refill(now)
        return self._tokens

    def give_back(self, cost: float) -> None:
        self._tokens += cost

    def _refill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + (now - self._as_of) * self._per_second)
        self._as_of = now


class TokenBuckets:
    """One bucket per name, for at most `names_max` names; forgets the least recently used."""

    def __init__(self, per_second: float, burst: float, names_max: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._buckets: Recent[str, TokenBucket] = Recent(names_max)

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, name: str) -> TokenBucket:
        """Return the bucket of `name`; a new, full one if the name is not remembered."""
        return self._buckets.of(name, lambda: TokenBucket(self._per_second, self._burst))


@dataclass(frozen=True)
class HourlyBytes:
    """What a service gives away in an hour."""

    network: int
    """To one network (/24, IPv6: /48); peers of private and relayed addresses count one by one."""
    unplaced: int
    """To all peers of private and relayed addresses together: identities are free there, so they
    shall not use up what networks get."""
    all: int


class NetworkBudgets:
    """Hourly budgets of bytes by the networks of the peers that ask."""

    def __init__(self, hourly: HourlyBytes) -> None:
        self._networks = TokenBuckets(hourly.network / HOUR, hourly.network, NETWORKS_MAX)
        self._unplaced = TokenBucket(hourly.unplaced / HOUR, hourly.unplaced)
        self._all = TokenBucket(hourly.all / HOUR, hourly.all)

    def take(self, peer: str, network: str, size_bytes: int, now: float) -> bool:
        """Whether all budgets had the bytes, and gave them; `network` as `Transport.network_of`."""
        own = self._networks.of(network or peer)
        buckets = [own, self._all] if network else [own, self._all, self._unplaced]
        for number, bucket in enumerate(buckets):
            if not bucket.take(size_bytes, now):
                for taken in buckets[:number]:
                    taken.give_back(size_bytes)
                return False
        return True
