"""Bulk transfers as fluids: every transfer flows at its max-min fair rate.

Max-min fair: no transfer can get more without taking from one that has no more than itself. In each
round of filling every link offers its unsettled transfers equal shares of its remaining capacity; a
bottleneck offers none of its transfers more than the transfer's other link does, and settles them
at its share (Bertsekas and Gallager, Data Networks, 6.5.2, with all bottlenecks of a round at
once). Few rounds are needed: ten thousand transfers cost less than a millisecond.

Changes are collected for `BATCH_SECONDS`. Until then a new transfer flows at the rate that both of
its links have left, so that the successor of an ended transfer loses no time."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from simnet.clock import Timeline

BATCH_SECONDS = 0.05
TOLERANCE = 1e-3
"""A link counts as a bottleneck when it offers at most this much (relative) more than others."""

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.intp]


class Link:
    """One direction of a peer's access line. Used with one `Flows` only."""

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(
                f"a link's rate must be above 0 bytes per second, not {bytes_per_second}"
            )
        self.bytes_per_second = bytes_per_second
        self.number = -1
        """Index among the links of its `Flows`."""


@dataclass(slots=True, eq=False)
class Flow:
    number: int
    up: Link
    down: Link
    saved: float
    """Bytes left, while it is paused."""
    on_end: "Callable[[Flow], None] | None"
    """Called once, when the transfer is complete or has failed; None afterwards."""
    failure: str | None = None
    index: int = -1
    """Index of its numbers in the arrays of `Flows`, while it flows."""

    @property
    def ended(self) -> bool:
        return self.on_end is None


class Flows:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._numbers = 0
        self._batches = 0
        self._batch_at = inf
        self._last_batch = -inf
        self._links: list[Link] = []
        # Python's arrays: NumPy's need three times as long for one number, and see these as theirs.
        self._capacity, self._used = array("d"), array("d")
        """Bytes per second of each link, and of its transfers at present."""
        self._ends = 0
        # Dense arrays of the flowing transfers: the last one takes a removed transfer's index.
        self._flows: list[Flow] = []
        self._columns: tuple[array[Any], ...] = tuple(array(code) for code in "qqddd")
        self._up, self._down, self._rate, self._left, self._since = self._columns

    def start(
        self,
        up: Link,
        down: Link,
        size_bytes: int,
        on_end: Callable[[Flow], None] = lambda flow: None,
    ) -> Flow:
        self._numbers += 1
        flow = Flow(self._numbers, up, down, float(size_bytes), on_end)
        self.resume(flow)
        return flow

    def left_bytes(self, flow: Flow) -> float:
        index = flow.index
        if index < 0:
            return flow.saved
        passed = trio.current_time() - self._since[index]
        return float(max(0.0, self._left[index] - self._rate[index] * passed))

    def rate(self, flow: Flow) -> float:
        """Bytes per second, at present."""
        return self._rate[flow.index] if flow.index >= 0 else 0.0

    def total_rate(self) -> float:
        """Bytes per second of all transfers together, at present."""
        return float(np.array(self._rate).sum())

    def widen(self, link: Link, bytes_per_second: float) -> None:
        """Give a link another rate from now on."""
        link.bytes_per_second = bytes_per_second
        if link.number >= 0:
            self._capacity[link.number] = bytes_per_second
            self._change(trio.current_time())

    def pause(self, flow: Flow) -> None:
        if flow.index >= 0:
            flow.saved = self.left_bytes(flow)
            self._leave(flow)

    def resume(self, flow: Flow) -> None:
        if flow.ended or flow.index >= 0:
            return
        up, down = flow.up, flow.down
        if up.number < 0:
            self._add_link(up)
        if down.number < 0:
            self._add_link(down)
        flow.index = len(self._flows)
        self._flows.append(flow)
        # What both links have left: no other transfer gets slower before the next recomputation,
        # and no link carries more than it can.
        now = trio.current_time()
        used = self._used
        room = up.bytes_per_second - used[up.number]
        other = down.bytes_per_second - used[down.number]
        rate = max(0.0, room if room < other else other)
        used[up.number] += rate
        used[down.number] += rate
        self._up.append(up.number)
        self._down.append(down.number)
        self._rate.append(rate)
        self._left.append(flow.saved)
        self._since.append(now)
        self._change(now)
        # A later end is found by the recomputation, with the rate of then.
        if rate > 0.0 and now + flow.saved / rate <= self._batch_at:
            self._end_at(now + flow.saved / rate, flow)

    def fail(self, flow: Flow, reason: str) -> None:
        """End a transfer early; does nothing if it has ended already."""
        if not flow.ended:
            self.pause(flow)
            flow.failure = reason
            self._tell(flow)

    def _add_link(self, link: Link) -> None:
        link.number = len(self._links)
        self._links.append(link)
        self._capacity.append(link.bytes_per_second)
        self._used.append(0.0)

    def _leave(self, flow: Flow) -> None:
        index = flow.index
        rate = self._rate[index]
        self._used[flow.up.number] -= rate
        self._used[flow.down.number] -= rate
        last = self._flows.pop()
        moved = [each.pop() for each in self._columns]
        if last is not flow:
            self._flows[index] = last
            last.index = index
            for each, number in zip(self._columns, moved, strict=True):
                each[index] = number
        flow.index = -1
        self._change(trio.current_time())

    @staticmethod
    def _tell(flow: Flow) -> None:
        on_end, flow.on_end = flow.on_end, None
        if on_end is not None:
            on_end(flow)

    # --- rates ---

    def _change(self, now: float) -> None:
        if self._batch_at == inf:
            self._batches += 1
            self._batch_at = max(now, self._last_batch + BATCH_SECONDS)
            self._timeline.at(self._batch_at, "flows", self._batches, self._share)

    def _share(self) -> None:
        """Recompute all rates, and find the transfers that end before the next recomputation."""
        now = trio.current_time()
        self._batch_at = inf
        self._last_batch = now
        if not self._flows:
            return
        rate, left, since, capacity = map(
            np.frombuffer, (self._rate, self._left, self._since, self._capacity)
        )
        up, down = np.frombuffer(self._up, np.intp), np.frombuffer(self._down, np.intp)
        left -= rate * (now - since)
        np.maximum(left, 0.0, out=left)
        since[:] = now
        rate[:] = fair_rates(up, down, capacity)
        used = np.bincount(up, rate, len(capacity)) + np.bincount(down, rate, len(capacity))
        np.frombuffer(self._used)[:] = used
        due = left / rate
        due += now
        # No rate changes before the next end, which then looks for later ends.
        horizon = max(now + BATCH_SECONDS, float(due.min()))
        for index in np.flatnonzero(due <= horizon).tolist():
            self._end_at(float(due[index]), self._flows[index])

    def _end_at(self, time: float, flow: Flow) -> None:
        self._ends += 1
        self._timeline.at(time, "flow end", self._ends, partial(self._through, flow))

    def _through(self, flow: Flow) -> None:
        if flow.index < 0:
            return
        left = self.left_bytes(flow)
        rate = self.rate(flow)
        if left > max(1e-3, rate * 1e-6):
            return  # slowed down or paused since: it has or gets another end
        self._leave(flow)
        flow.saved = 0.0
        self._tell(flow)


def fair_rates(up: _Indices, down: _Indices, capacity: _Floats) -> _Floats:
    """Max-min fair rates of transfers over the links `up[i]` and `down[i]`."""
    links = len(capacity)
    rates: _Floats = np.empty(len(up))
    indices: _Indices = np.arange(len(up))
    left = capacity.copy()
    while True:
        counts = np.bincount(up, minlength=links) + np.bincount(down, minlength=links)
        share = left / np.maximum(counts, 1)
        at_up, at_down = share.take(up), share.take(down)
        # A link that does not limit all of its transfers is not settled yet. The busy link with the
        # smallest share always does, so each round settles some.
        loose = np.zeros(links, dtype=bool)
        loose[up.compress(at_up > at_down * (1.0 + TOLERANCE))] = True
        loose[down.compress(at_down > at_up * (1.0 + TOLERANCE))] = True
        rest = loose.take(up) & loose.take(down)
        rate = np.minimum(at_up, at_down)
        if not rest.any():
            rates[indices] = rate
            # Rounding must not stop a transfer.
            return np.maximum(rates, 1e-3)
        # By `compress`: indexing by an array of booleans takes three times as long.
        settled = ~rest
        settled_rate = rate.compress(settled)
        rates[indices.compress(settled)] = settled_rate
        left -= np.bincount(up.compress(settled), settled_rate, links)
        left -= np.bincount(down.compress(settled), settled_rate, links)
        np.maximum(left, 0.0, out=left)  # the tolerance may take a little more than there is
        indices, up, down = indices.compress(rest), up.compress(rest), down.compress(rest)
