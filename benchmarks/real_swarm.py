"""A swarm of real peers on loopback for benchmarks, and the causes of seconds without a step.

Each peer is a process of its own (`tests.end_to_end.harness`), which a script starts again when it
ends. Peers' activities are read from their printed events; disturbances are recorded here.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from tests.end_to_end.harness import Peer, Swarm, make_base, running_fork_server, swarm

NAMES = ["bootstrap", "relay", "trainer", "validator", "inference-1", "inference-2", "inference-3"]
VICTIMS = ["bootstrap", "relay", "trainer", "validator", "inference-1"]
"""One peer of each role."""

BEFORE_SECONDS = 15.0
"""A gap is reported with the disturbances up to this long before it."""

AWAY = "away"
STARTING = "starting"
STOPPED = "stopped"


@dataclass(frozen=True)
class Deed:
    """A disturbance of a peer, or its start or end."""

    time: float
    peer: str
    what: str
    """`SIGKILL`, `SIGTERM`, `SIGSTOP`, `SIGCONT`, `SIGKILL of child NAME`, `ended` (with its
    status and last words), or `started`."""
    by_itself: bool = False


@dataclass
class RealSwarm:
    """The peers, and their disturbances."""

    peers: Swarm
    seconds_away: Callable[[], float]
    """Seconds before an ended peer is started again."""
    deeds: list[Deed] = field(default_factory=list)
    busy: set[str] = field(default_factory=set)
    """Peers that are being disturbed, or are down."""
    ending: bool = False

    def note(self, peer: str, what: str, *, by_itself: bool = False) -> None:
        self.deeds.append(Deed(time.time(), peer, what, by_itself))

    async def keep_running(self, name: str) -> None:
        """Start a peer again whenever it has ended, until cancelled."""
        peer = self.peers[name]
        while True:
            status = await peer.status.wait_until(lambda status: status is not None)
            if self.ending and status == 0:
                return
            self.busy.add(name)
            killed = status == -signal.SIGKILL or self._was_asked_to_end(name)
            words = "" if killed else "; ".join(peer.complaints[-2:])[:500]
            self.note(name, f"ended with {status} {words}".rstrip(), by_itself=not killed)
            await trio.sleep(self.seconds_away())
            self.peers.restart(name)
            self.note(name, "started")
            self.busy.discard(name)

    def _was_asked_to_end(self, name: str) -> bool:
        last = next((deed for deed in reversed(self.deeds) if deed.peer == name), None)
        return last is not None and last.what == "SIGTERM"

    def kill(self, name: str, which: signal.Signals = signal.SIGKILL) -> None:
        """End a peer: by SIGKILL with its children, or by SIGTERM."""
        self.note(name, which.name)
        with suppress(ProcessLookupError):
            self.peers[name].send(which)

    async def stop(self, name: str, seconds: float) -> None:
        """Stop a peer for a while, as when its machine hangs."""
        peer = self.peers[name]
        self.busy.add(name)
        self.note(name, STOPPED)
        pid = peer.pid
        peer.send(signal.SIGSTOP)
        try:
            await trio.sleep(seconds)
        finally:
            if peer.pid == pid and peer.status.value is None:
                with suppress(ProcessLookupError):
                    peer.send(signal.SIGCONT)
        self.note(name, "SIGCONT")
        self.busy.discard(name)

    def kill_child(self, name: str, choose: Callable[[Sequence[Any]], Any]) -> bool:
        """Kill one of a peer's compute children, if it has any."""
        children = self.peers[name].children()
        if not children:
            return False
        child = choose(sorted(children))
        self.note(name, f"SIGKILL of child {child}")
        with suppress(ProcessLookupError):
            os.kill(children[child], signal.SIGKILL)
        return True


@asynccontextmanager
async def running_swarm(
    steps: int,
    seconds_away: Callable[[], float],
    names: Sequence[str] = NAMES,
    settings: dict[str, dict[str, Any]] | None = None,
) -> AsyncIterator[RealSwarm]:
    """Start a swarm and keep each of its peers running.

    After the block no process is left, even after Ctrl-C or SIGTERM.
    """
    with prepared() as (folder, base, fork_server):
        async with swarm(
            folder, base, fork_server, names=names, steps=steps, settings=settings
        ) as peers:
            real = RealSwarm(peers, seconds_away)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_heed_signals, nursery.cancel_scope)
                await peers.start()
                for each in names:
                    nursery.start_soon(real.keep_running, each)
                yield real
                nursery.cancel_scope.cancel()


@contextmanager
def prepared() -> Iterator[tuple[Path, Path, Path]]:
    """A temporary folder, a base policy in it, and the socket of a running fork server."""
    with tempfile.TemporaryDirectory(prefix="swarm-real-") as name:
        folder = Path(name)
        base = folder / "base"
        make_base(base)
        with running_fork_server(folder) as fork_server:
            yield folder, base, fork_server


async def _heed_signals(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for which in signals:
            raise SystemExit(128 + which)


# --- what the time went into -------------------------------------------------------------------


def steps_made(trainer: Peer) -> list[float]:
    """Times of the first publication of each new policy, the base policy first."""
    newest = -1
    times = []
    for event in trainer.heard("trainer.checkpoint_published"):
        if event["step"] > newest:
            newest = event["step"]
            times.append(event["time"])
    return times


class Doings:
    """A peer's activity at any time, from its own status and the recorded disturbances."""

    def __init__(self, real: RealSwarm, name: str) -> None:
        changes: list[tuple[float, str]] = []
        for event in real.peers[name].events:
            if event["event"] == "peer.status":
                changes.append((event["time"], re.sub(r"\d+", "N", event["doing"])))
            elif event["event"] == "peer.listening":
                changes.append((event["time"], "joining"))
        self._stops: list[tuple[float, float]] = []
        stopped = 0.0
        for deed in real.deeds:
            if deed.peer != name:
                continue
            if deed.what.startswith(("SIGKILL", "SIGTERM", "ended")) and "child" not in deed.what:
                changes.append((deed.time, AWAY))
            elif deed.what == "started":
                changes.append((deed.time, STARTING))
            elif deed.what == STOPPED:
                stopped = deed.time
            elif deed.what == "SIGCONT":
                self._stops.append((stopped, deed.time))
        self._changes = sorted(changes)

    def at(self, moment: float) -> str:
        if any(begin <= moment < end for begin, end in self._stops):
            return STOPPED
        index = bisect.bisect_right(self._changes, (moment, "\uffff")) - 1
        return self._changes[index][1] if index >= 0 else STARTING


def _cause(moment: float, doings: dict[str, Doings]) -> str:
    """Cause of a gap at a moment: the trainer, else its validator, else the workers."""
    trainer = doings["trainer"].at(moment)
    if not trainer.startswith("waiting"):
        return f"trainer {trainer}"
    validator = doings["validator"].at(moment)
    if not validator.startswith(("ready", "judging")):
        return f"trainer waiting, validator {validator}"
    workers = sorted(doings[name].at(moment) for name in doings if name.startswith("inference"))
    return f"trainer waiting, validator {validator}, workers {', '.join(workers)}"


def gaps(real: RealSwarm, since: float, until: float, least_seconds: float) -> list[dict[str, Any]]:
    """The gaps without a step, each with the causes of its seconds, the disturbances shortly before
    and in it, and the peers' complaints."""
    doings = {name: Doings(real, name) for name in real.peers.peers}
    moments = [since, *(t for t in steps_made(real.peers["trainer"]) if since < t < until), until]
    found = []
    for begin, end in itertools.pairwise(moments):
        if end - begin < least_seconds:
            continue
        ticks = [begin + (i + 0.5) / 10 for i in range(int((end - begin) * 10))]
        causes = Counter(_cause(tick, doings) for tick in ticks)
        found.append(
            {
                "at": round(begin - since, 1),
                "seconds": round(end - begin, 1),
                "went_into": {cause: round(n / 10, 1) for cause, n in causes.most_common()},
                "done": [
                    f"{deed.time - begin:+.1f} {deed.peer} {deed.what}"
                    for deed in real.deeds
                    if begin - BEFORE_SECONDS <= deed.time < end
                ],
                "complaints": _complaints(real, begin, end),
            }
        )
    return found


TELLING = (
    "compute.child_died",
    "compute.child_restarted",
    "gossip.neighbour_lost",
    "gossip.neighbour_unreachable",
    "gossip.not_spoken",
    "inference.delivery_failed",
    "inference.no_validator",
    "inference.verdict_late",
    "membership.lease_lost",
    "membership.trusted_silent",
    "messenger.line_broke",
    "shardcast.checkpoint_failed",
    "trainer.fetch_failed",
    "trainer.starved",
    "trainer.unjudged_forgotten",
    "validator.receipt_undelivered",
)
COMPLAINTS_SHOWN = 20


def _complaints(real: RealSwarm, begin: float, end: float) -> dict[str, int]:
    """Peers' complaints in a gap, most frequent first."""
    names = {str(peer.identity.peer_id): name for name, peer in real.peers.peers.items()}
    said: Counter[str] = Counter()
    for name, peer in real.peers.peers.items():
        for event in peer.events:
            if event["event"] not in TELLING or not begin <= event["time"] < end:
                continue
            reason = str(event.get("reason") or event.get("how") or event.get("waiting_for") or "")
            for known, short in names.items():
                reason = reason.replace(known, short)
            of = str(event.get("remote") or event.get("validator") or event.get("name") or "")
            said[f"{name} {event['event']} {names.get(of, of)} {reason[:160]}".strip()] += 1
    return dict(said.most_common(COMPLAINTS_SHOWN))


def by_cause(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of all gaps together, by cause."""
    totals: Counter[str] = Counter()
    for gap in found:
        for cause, seconds in gap["went_into"].items():
            totals[cause] += seconds
    return {cause: round(seconds, 1) for cause, seconds in totals.most_common()}


def pace(times: Sequence[float], since: float, until: float) -> float:
    """Steps per minute."""
    made = sum(since <= t < until for t in times)
    return round(60 * made / max(until - since, 1e-9), 1)


def per_minute(times: Sequence[float], since: float, until: float) -> list[int]:
    """Steps made in each minute, with the number of minutes rounded."""
    minutes = max(1, round((until - since) / 60))
    return [
        sum(since + 60 * i <= t < min(until, since + 60 * (i + 1)) for t in times)
        for i in range(minutes)
    ]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and maximum, rounded to a tenth."""
    if not seconds:
        return {"median": 0.0, "worst": 0.0}
    return {"median": round(statistics.median(seconds), 1), "worst": round(max(seconds), 1)}
