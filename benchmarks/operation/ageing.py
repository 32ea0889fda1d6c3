"""Real peers grow old: memory of every process and bytes of every home, as submissions add up.

    python -m benchmarks.operation ageing

Nine processes on loopback (bootstrap, relay, trainer, a standby, validator, three workers of which
one has an endpoint, an observer with a dashboard) train the demo's tiny model until 3,000
submissions are judged, about 15 minutes of two busy cores. An epoch of the ledger is sealed every
`EPOCH_ENTRIES` entries. At each of the marks every process is measured. Early on and at the end
each peer in turn gets SIGTERM and is started again.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import trio

from benchmarks.operation.processes import Memory, memory_of
from benchmarks.real_swarm import prepared
from benchmarks.spread import load_average
from peers.demo.local_peers import free_ports
from swarm.manifest import Limits
from tests.end_to_end.harness import Peer, Swarm, swarm

NAMES = [
    "bootstrap",
    "relay",
    "trainer",
    "trainer-2",
    "validator",
    "inference-1",
    "inference-2",
    "inference-3",
    "observer",
]
"""The second trainer is a standby."""
STEPS = 1_000_000
"""More than it can make."""
YOUNG = 100
SUBMISSIONS = (500, 1500, 3000)
EPOCH_ENTRIES = 600
"""A step makes about 9."""
PROOFS_KEPT_BYTES = 300_000
"""Room for proofs of a worker's own work, so small that the run fills it."""

START_SECONDS = 240.0
STEP_SECONDS = 240.0
AWAY_SECONDS = 1.0
READY = {
    "bootstrap": "peer.listening",
    "relay": "membership.admitted",
    "inference": "membership.admitted",
    "observer": "membership.admitted",
    "trainer": "peer.status",
    "validator": "peer.status",
}
"""Event with which a peer of a role takes part again."""


class Home(msgspec.Struct, frozen=True):
    """What a peer's home holds."""

    bytes: int
    files: int
    parts: dict[str, int]
    """Bytes by file or folder at its top."""


class Aged(msgspec.Struct, frozen=True):
    """One peer at one mark."""

    network: Memory
    """Of its network process."""
    children: dict[str, Memory]
    """Of its compute children, by name."""
    home: Home


class Mark(msgspec.Struct, frozen=True):
    """All peers once so many submissions are judged."""

    submissions: int
    steps: int
    seconds: float
    load: float
    seals: int
    peers: dict[str, Aged]


class Restarts(msgspec.Struct, frozen=True):
    """Seconds from SIGTERM to the peer's end, and from its next start until it takes part."""

    submissions: int
    load: float
    ended_after: dict[str, float]
    back_after: dict[str, float]


class Ageing(msgspec.Struct, frozen=True):
    """The marks and restarts, in order."""

    marks: list[Mark]
    restarts: list[Restarts]


def measure() -> Ageing:
    return trio.run(_measure)


async def _measure() -> Ageing:
    began = time.monotonic()
    settings: dict[str, dict[str, str | int | float | bool]] = {
        f"inference-{n}": {"proofs_kept_bytes": PROOFS_KEPT_BYTES} for n in (1, 2, 3)
    }
    web, agents = free_ports(2)
    settings["inference-3"]["endpoint"] = f"127.0.0.1:{agents}"
    settings["trainer"] = {"standby_minutes": 1}
    with prepared() as (folder, base, fork_server):
        made = swarm(
            folder, base, fork_server, names=NAMES, steps=STEPS, settings=settings,
            limits=Limits(epoch_entries=EPOCH_ENTRIES),
        )  # fmt: skip
        async with made as peers:
            config = peers["observer"].home / "settings.toml"
            config.write_text(f'dashboard = "127.0.0.1:{web}"\n' + config.read_text())
            await peers.start()
            marks, restarts = [], []
            await _judged(peers, YOUNG)
            restarts.append(await _restart_each(peers))
            for submissions in SUBMISSIONS:
                await _judged(peers, submissions)
                marks.append(_mark(peers, time.monotonic() - began))
                _say(marks[-1])
            restarts.append(await _restart_each(peers))
            await _judged(peers, len(peers["validator"].heard("validator.verdict")) + YOUNG)
            marks.append(_mark(peers, time.monotonic() - began))
            _say(marks[-1])
            return Ageing(marks, restarts)


def _say(mark: Mark) -> None:
    print(
        f"{mark.submissions} submissions after {mark.seconds:.0f} s, load {mark.load:g}",
        file=sys.stderr,
    )


async def _judged(peers: Swarm, submissions: int) -> None:
    """Wait until so many submissions are judged."""
    validator = peers["validator"]
    while len(validator.heard("validator.verdict")) < submissions:
        since = len(validator.events)
        await validator.says("validator.verdict", since=since, seconds=STEP_SECONDS)


async def _restart_each(peers: Swarm) -> Restarts:
    submissions = len(peers["validator"].heard("validator.verdict"))
    load, ended, back = load_average(), {}, {}
    for name in NAMES:
        peer = peers[name]
        assert peer.status.value is None, f"{name} ended by itself: {peer.complaints[-3:]}"
        began = time.monotonic()
        peer.send(signal.SIGTERM)
        await peer.ended(START_SECONDS)
        ended[name] = round(time.monotonic() - began, 2)
        since = len(peer.events)
        await trio.sleep(AWAY_SECONDS)
        began = time.monotonic()
        peers.restart(name)
        event = READY[peer.role]
        await peer.says(event, since=since, seconds=START_SECONDS)
        back[name] = round(time.monotonic() - began, 2)
        print(f"restart of {name}: {ended[name]} s, {back[name]} s", file=sys.stderr)
    return Restarts(submissions, load, ended, back)


def _mark(peers: Swarm, seconds: float) -> Mark:
    trainer, validator = peers["trainer"], peers["validator"]
    return Mark(
        submissions=len(validator.heard("validator.verdict")),
        steps=len(trainer.heard("trainer.step_trained")),
        seconds=round(seconds, 1),
        load=load_average(),
        seals=len(validator.heard("ledger.sealed")),
        peers={name: _aged(peer) for name, peer in peers.peers.items()},
    )


def _aged(peer: Peer) -> Aged:
    children = {}
    for name, pid in sorted(peer.children().items()):
        with suppress(OSError):  # it has ended meanwhile
            children[name] = memory_of(pid)
    return Aged(memory_of(peer.pid), children, _home(peer.home))


def _home(folder: Path) -> Home:
    parts: dict[str, int] = {}
    files = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it has gone meanwhile
            if path.is_file() and not path.is_symlink():
                top = path.relative_to(folder).parts[0]
                parts[top] = parts.get(top, 0) + path.stat().st_size
                files += 1
    return Home(sum(parts.values()), files, dict(sorted(parts.items())))
