"""How long a body of the piece plane may take, and how fast this peer sends."""

from collections.abc import Callable

import trio

from swarm.transport.http import limits
from swarm.transport.rates import TokenBucket

PORTION_SECONDS = 0.02
"""Duration of one portion on a limited uplink: after each portion another connection may send."""

PORTION_BYTES_MIN = 1500
"""Smallest portion: one packet."""

UPLINK_BURST_SECONDS = 0.1
"""Unused time of a limited uplink that may be made up for: the system wakes a process late."""


class Broken(Exception):
    """The other side closed, stalled, or was too slow. The message says which."""


class Pace:
    """One body's transfer, within `scope`: no stall, a minimum average rate, an admitted client."""

    def __init__(self, size_bytes: int, still: Callable[[], bool] = lambda: True) -> None:
        """`still()` says whether the other side is still admitted."""
        self._began = trio.current_time()
        self._end = self._began + limits.STALL_SECONDS + size_bytes / limits.BYTES_PER_SECOND_MIN
        self._still = still
        self._asked = self._began
        self._moved = self._began
        self.done = 0
        """Bytes moved so far, for `complaint`."""
        self.scope = trio.CancelScope()
        self._set()

    def _set(self) -> None:
        self.scope.deadline = min(self._moved + limits.STALL_SECONDS, self._end)

    def moved(self) -> None:
        """Note that bytes have moved. Raises `Broken` when the other side lost its admission."""
        now = trio.current_time()
        if now - self._asked > limits.ADMITTED_SECONDS:
            self._asked = now
            if not self._still():
                raise Broken("is no longer admitted")
        # Moving a deadline costs more than reading the clock: a tenth of the stall is exact enough.
        if now - self._moved > limits.STALL_SECONDS / 10:
            self._moved = now
            self._set()

    def wait(self, seconds: float) -> None:
        """Extend the deadlines by `seconds`, for which this side's own limit delays the body."""
        self._end += seconds
        self._moved += seconds
        self._set()

    def complaint(self) -> str:
        seconds = trio.current_time() - self._began
        return f"stalled or was too slow: {self.done} bytes in {seconds:.1f} s"


class Uplink:
    """Limits the rate at which this peer's piece plane sends; None: no limit."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._bucket: TokenBucket | None = None
        self.portion_bytes = limits.READ_BYTES
        """Bytes sent at once."""
        if bytes_per_second is not None:
            portion = int(bytes_per_second * PORTION_SECONDS)
            self.portion_bytes = max(PORTION_BYTES_MIN, min(limits.READ_BYTES, portion))
            self._bucket = TokenBucket(bytes_per_second, bytes_per_second * UPLINK_BURST_SECONDS)

    async def take(self, size_bytes: int, pace: Pace) -> None:
        """Wait until `size_bytes` of a body may be sent, in the order of the calls."""
        if self._bucket is None:
            return
        now = trio.current_time()
        seconds = self._bucket.debt_seconds(now)
        self._bucket.borrow(size_bytes, now)
        if not seconds:
            return
        pace.wait(seconds)
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            self.give_back(size_bytes)
            raise

    def give_back(self, size_bytes: int) -> None:
        """Return the allowance for bytes that were not sent."""
        if self._bucket is not None:
            self._bucket.give_back(size_bytes)
