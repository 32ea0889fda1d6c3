"""Bulk transfers as fluids: every transfer flows at its max-min fair rate.

A transfer passes two links, the sender's uplink and the receiver's downlink. Rates are max-min
fair when no transfer can have more without taking from one that has no more than it. Each link
has a *level*, the most it gives one transfer; a transfer's rate is the lower of its two levels;
a level is right when the link is full, or unlimited when all its transfers are held back
elsewhere. When transfers begin or end, the levels of their links are set anew, then those of
links whose transfers changed by it, until nothing moves by more than `TOLERANCE`: the fixed point
is the max-min allocation (Bertsekas and Gallager, Data Networks, 6.5.2), and links that nothing
changed for are not touched.

Changes are collected for `BATCH_SECONDS`; until then a new transfer flows at what both of its
links have left, so that the successor of one that ended loses no time.
"""

from __future__ import annotations

from math import inf

import trio

from simnet.timeline import Timeline

BATCH_SECONDS = 0.05
TOLERANCE = 1e-4
"""Relative change of a level that other links are told of."""

ROUNDS_MAX = 50
"""Times that one link's level is set in a batch: what is left moves with the next batch."""


class Link:
    """One direction of a peer's access line."""

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a link carries more than 0 bytes a second, not {bytes_per_second}")
        self.bytes_per_second = bytes_per_second
        self.flows: dict[Flow, None] = {}
        """In order of arrival (a set would have another order in each process)."""
        self.level = inf

    def left(self) -> float:
        """Bytes a second that nobody uses."""
        return max(0.0, self.bytes_per_second - sum(flow.rate for flow in self.flows))

    def fair_level(self) -> float:
        """The most this link can give one transfer, seeing what the others' other links allow."""
        demands = sorted(flow.other(self).level for flow in self.flows)
        left = self.bytes_per_second
        for index, demand in enumerate(demands):
            share = left / (len(demands) - index)
            if demand >= share:
                return share
            left -= demand
        return inf


class Flow:
    """One transfer; `ended` is set when it is through (or has failed: then `failure` says why)."""

    def __init__(self, number: int, up: Link, down: Link, size_bytes: int) -> None:
        self.number = number
        self.up = up
        self.down = down
        self.left_bytes = float(size_bytes)
        self.rate = 0.0
        self.since = 0.0
        """When `left_bytes` was right."""
        self.due = inf
        """When the timeline looks at it next."""
        self.looks = 0
        self.ended = trio.Event()
        self.failure: str | None = None

    def other(self, link: Link) -> Link:
        return self.down if link is self.up else self.up

    def advance(self, now: float) -> None:
        self.left_bytes -= self.rate * (now - self.since)
        self.since = now


class Flows:
    """All transfers of a network."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._numbers = 0
        self._batches = 0
        self._changed: dict[Link, None] = {}
        self._batch_at = inf
        self._last_batch = -inf
        self.allocations = 0
        """Levels set so far: what the fair sharing costs."""

    def start(self, up: Link, down: Link, size_bytes: int) -> Flow:
        """Begin a transfer."""
        self._numbers += 1
        flow = Flow(self._numbers, up, down, size_bytes)
        flow.since = trio.current_time()
        self.resume(flow)
        return flow

    def pause(self, flow: Flow) -> None:
        """Nothing of it arrives, until `resume`."""
        if flow in flow.up.flows:
            self._set_rate(flow, 0.0)
            self._leave(flow)

    def resume(self, flow: Flow) -> None:
        """Let a paused transfer flow again."""
        if flow.ended.is_set() or flow in flow.up.flows:
            return
        rate = min(flow.up.left(), flow.down.left())
        for link in (flow.up, flow.down):
            link.flows[flow] = None
            self._change(link)
        self._set_rate(flow, rate)

    def fail(self, flow: Flow, reason: str) -> None:
        """End a transfer early; silent when it has ended."""
        if not flow.ended.is_set():
            self.pause(flow)
            flow.failure = reason
            flow.ended.set()

    def _leave(self, flow: Flow) -> None:
        for link in (flow.up, flow.down):
            del link.flows[flow]
            self._change(link)

    # --- rates ---

    def _change(self, link: Link) -> None:
        self._changed[link] = None
        if self._batch_at == inf:
            self._batches += 1
            self._batch_at = max(trio.current_time(), self._last_batch + BATCH_SECONDS)
            self._timeline.at(self._batch_at, "flows", self._batches, self._share)

    def _share(self) -> None:
        """Set the levels of changed links, and of those they change, until all are right."""
        self._batch_at = inf
        self._last_batch = trio.current_time()
        todo, self._changed = self._changed, {}
        rounds: dict[Link, int] = {}
        touched: dict[Flow, None] = {}
        while todo:
            link = next(iter(todo))
            del todo[link]
            touched.update(link.flows)
            self.allocations += 1
            old, new = link.level, link.fair_level()
            link.level = new
            if old == new or abs(new - old) <= TOLERANCE * min(old, new):
                continue
            rounds[link] = rounds.get(link, 0) + 1
            if rounds[link] > ROUNDS_MAX:
                continue
            for flow in link.flows:
                other = flow.other(link)
                # The other link sees a change only below its own level.
                if min(old, new) < other.level or other.level == inf:
                    todo[other] = None
        for flow in touched:
            self._set_rate(flow, min(flow.up.level, flow.down.level))

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now = trio.current_time()
        flow.advance(now)
        flow.rate = rate
        due = now + max(0.0, flow.left_bytes) / rate if rate > 0 else inf
        # One that takes longer now is looked at too early, and then again.
        if due < flow.due:
            self._look_at(flow, due)

    def _look_at(self, flow: Flow, due: float) -> None:
        flow.due = due
        flow.looks += 1
        looks = flow.looks
        self._timeline.at(due, f"flow {flow.number:012d}", looks, lambda: self._look(flow, looks))

    def _look(self, flow: Flow, looks: int) -> None:
        if looks != flow.looks or flow.ended.is_set():
            return
        now = trio.current_time()
        flow.advance(now)
        flow.due = inf
        if flow.left_bytes <= max(1e-6, flow.rate * 1e-9):
            if flow in flow.up.flows:
                flow.rate = 0.0
                self._leave(flow)
            flow.left_bytes = 0.0
            flow.ended.set()
        elif flow.rate > 0:
            self._look_at(flow, now + flow.left_bytes / flow.rate)


def exact_rates(pairs: list[tuple[Link, Link]]) -> list[float]:
    """Max-min fair rates of transfers over (uplink, downlink), by progressive filling: all rates
    rise together until a link is full, whose transfers are then settled. Slow; to compare with."""
    rates: list[float | None] = [None] * len(pairs)
    left: dict[Link, float] = {}
    for pair in pairs:
        for link in pair:
            left[link] = link.bytes_per_second
    while None in rates:
        counts: dict[Link, int] = {}
        for pair, rate in zip(pairs, rates, strict=True):
            if rate is None:
                for link in pair:
                    counts[link] = counts.get(link, 0) + 1
        full = min(counts, key=lambda link: left[link] / counts[link])
        share = left[full] / counts[full]
        for index, pair in enumerate(pairs):
            if rates[index] is None and full in pair:
                rates[index] = share
                for link in pair:
                    left[link] -= share
    return [rate for rate in rates if rate is not None]
