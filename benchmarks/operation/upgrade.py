"""Every peer of a real swarm of an older build is replaced by this build, one after the other.

Twenty processes on loopback train the demo's tiny model, at first all of the older build. Each in
turn gets SIGTERM; once it has ended, this build is started on its home, and the next peer waits
until it has done its part in the run again. The last is put back to the older build for a moment,
which must refuse the home. Then the owner ends the run, and the trusted peers' logs are compared
with what the workers handed in.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import msgspec
import trio

from benchmarks.operation.handed_in import SETTLE_SECONDS, delivered, lost, receipts, settle
from benchmarks.operation.report import Spread, spread_of
from benchmarks.real_swarm import prepared, steps_made
from tests.end_to_end.harness import REPOSITORY, Swarm, swarm
from tests.end_to_end.ledgers import Accounts, check_accounts
from tests.end_to_end.test_update import changed, update
from tests.upgrade.older import OLDEST, VARIABLE, NoOlderBuild, older_build

NAMES = [
    "bootstrap",
    "relay-1",
    "relay-2",
    "validator-1",
    "validator-2",
    "validator-3",
    "trainer",
    *(f"inference-{number}" for number in range(1, 14)),
]
"""In the order of their upgrade."""

WORKS = {
    "bootstrap": "peer.listening",
    "relay": "membership.admitted",
    "validator": "validator.verdict",
    "trainer": "trainer.checkpoint_published",
    "inference": "inference.receipt",
}
"""Event with which a peer of a role has done its part in the run."""

STEPS_MOST = 100_000
"""Steps of the run until its owner ends it."""

MORE_STEPS = 10
"""Trained by this build alone, after the last peer."""

DEADLINE_SECONDS = 300.0
"""For a start, an end, or the rest of the run."""

ORDINARY = {"duplicate", "old_state"}
"""Causes for which gossip drops envelopes in every swarm."""

TURNED_AWAY = (
    "gossip.neighbour_banned",
    "messenger.peer_banned",
    "membership.refused",
    "membership.peer_evicted",
)


class Replaced(msgspec.Struct, frozen=True):
    """A peer that was replaced."""

    peer: str
    ended_after: float
    """Seconds from SIGTERM to the end of the process."""
    away: float
    """Seconds from SIGTERM until this build had done the peer's part in the run."""
    in_flight: int
    """Submissions acknowledged by a validator and without a receipt, at the signal."""
    status: int
    """Exit status of the older build."""
    steps: int
    """Policies published meanwhile."""


class Downwards(msgspec.Struct, frozen=True):
    """The older build on a home that this build has opened."""

    peer: str
    status: int | None
    """Exit status; None: it ran on."""
    said: list[str]
    """Lines of standard error."""


class Upgraded(msgspec.Struct, frozen=True):
    """What happened, and what was lost."""

    older: str
    peers: int
    replaced: list[Replaced]
    ended_after: dict[str, Spread]
    """By role."""
    away: dict[str, Spread]
    """By role."""
    seconds: float
    """From the first SIGTERM until the last peer worked again."""
    steps_meanwhile: int
    seconds_without_step_most: float
    """In that time."""
    steps: int
    submissions: int
    """Handed in: acknowledged by a validator."""
    without_verdict: int
    without_receipt: int
    """Of those with a verdict."""
    unreadable_to_older: int
    """Accepted ones that the older trainer dropped: it took stale ones into a batch that had come
    while it swept the others out, and its learner could not read them. Since then it sweeps
    again."""
    not_accepted: list[str]
    """The validator, the check that failed, and why, of each such verdict."""
    refused_envelopes: dict[str, int]
    """Dropped ones by cause, without `ORDINARY` ones."""
    turned_away: dict[str, int]
    """Peers that were banned, evicted, or refused as members, by event."""
    downwards: Downwards
    last_statuses: dict[str, int]
    """How many peers ended the run with each exit status."""


def measure() -> Upgraded:
    return trio.run(_measure)


async def _measure() -> Upgraded:
    with prepared() as (folder, base, fork_server):
        (folder / "older").mkdir()
        try:
            older = older_build(folder / "older")
        except NoOlderBuild as error:
            raise SystemExit(f"error: {error}") from error
        made = swarm(folder, base, fork_server, names=NAMES, steps=STEPS_MOST)
        async with made as peers:
            for peer in peers.peers.values():
                peer.build = older
            await peers.start()
            for name in NAMES:
                await _works(peers, name)
            began, monotonic = time.time(), time.monotonic()
            replaced = [await _replace(peers, name) for name in NAMES]
            seconds, until = time.monotonic() - monotonic, time.time()
            downwards = await _downwards(peers, NAMES[-1], older)
            accounts, statuses = await _end(peers, base)
            without_verdict, without_receipt = lost(peers, accounts)
            times = [t for t in steps_made(peers["trainer"]) if began <= t <= until]
            return Upgraded(
                older=os.environ.get(VARIABLE, OLDEST),
                peers=len(NAMES),
                replaced=replaced,
                ended_after=_by_role((each.peer, each.ended_after) for each in replaced),
                away=_by_role((each.peer, each.away) for each in replaced),
                seconds=round(seconds, 1),
                steps_meanwhile=len(times),
                seconds_without_step_most=round(
                    max(b - a for a, b in pairwise([began, *times, until])), 1
                ),
                steps=peers.manifest.schedule.steps,
                submissions=len(delivered(peers)),
                without_verdict=len(without_verdict),
                without_receipt=len(without_receipt),
                unreadable_to_older=len(_unreadable_to_older(peers)),
                not_accepted=_not_accepted(peers),
                refused_envelopes=_refused_envelopes(peers),
                turned_away={
                    name: count
                    for name in TURNED_AWAY
                    if (count := sum(len(p.heard(name)) for p in peers.peers.values()))
                },
                downwards=downwards,
                last_statuses=statuses,
            )


async def _works(peers: Swarm, name: str, since: int = 0) -> None:
    event = WORKS[peers[name].role]
    await peers[name].says(event, since=since, seconds=DEADLINE_SECONDS)


async def _replace(peers: Swarm, name: str) -> Replaced:
    peer, steps = peers[name], len(steps_made(peers["trainer"]))
    in_flight = len(delivered(peers) - receipts(peers))
    began = time.monotonic()
    status = await _exchange(peers, name, REPOSITORY)
    ended_after, since = time.monotonic() - began, len(peer.events)
    await _works(peers, name, since)
    return Replaced(
        name,
        round(ended_after, 2),
        round(time.monotonic() - began, 2),
        in_flight,
        status,
        len(steps_made(peers["trainer"])) - steps,
    )


async def _exchange(peers: Swarm, name: str, build: Path) -> int:
    """End a peer by SIGTERM, and start a build on its home; returns the exit status."""
    peer = peers[name]
    assert peer.status.value is None, f"{name} ended by itself: {peer.complaints[-3:]}"
    peer.send(signal.SIGTERM)
    status = await peer.ended(DEADLINE_SECONDS)
    peer.build = build
    peers.restart(name)
    return status


async def _downwards(peers: Swarm, name: str, older: Path) -> Downwards:
    """Put a peer back to the older build for a moment."""
    peer = peers[name]
    await _exchange(peers, name, older)
    complaints, status = len(peer.complaints), None
    with trio.move_on_after(SETTLE_SECONDS):
        status = await peer.ended(DEADLINE_SECONDS)
    said = peer.complaints[complaints:]
    if status is None:
        await _exchange(peers, name, REPOSITORY)
    else:
        peer.build = REPOSITORY
        peers.restart(name)
    since = len(peer.events)
    await _works(peers, name, since)
    return Downwards(name, status, said)


async def _end(peers: Swarm, base: Path) -> tuple[Accounts, dict[str, int]]:
    """Let the owner end the run; check the accounts, and end the peers that go on without it."""
    steps = len(steps_made(peers["trainer"])) + MORE_STEPS
    shorter = changed(peers.manifest, schedule={"steps": steps})
    await update(peers, base, shorter, "--bootstrap", peers["bootstrap"].multiaddr)
    over = await peers["trainer"].says("trainer.run_complete", seconds=DEADLINE_SECONDS)
    schedule = msgspec.structs.replace(shorter.schedule, steps=over["steps"])
    peers.manifest = msgspec.structs.replace(shorter, schedule=schedule)
    await settle(peers)
    for peer in [peers["trainer"], *peers.of_role("inference")]:
        await peer.ended(SETTLE_SECONDS)
    # Nothing trained on twice, nothing accepted lost.
    accounts = check_accounts(peers, _unreadable_to_older(peers))
    for peer in peers.peers.values():
        if peer.status.value is None:
            peer.send(signal.SIGTERM)
    statuses = [await peer.ended(SETTLE_SECONDS) for peer in peers.peers.values()]
    return accounts, {str(status): count for status, count in sorted(Counter(statuses).items())}


def _unreadable_to_older(peers: Swarm) -> list[str]:
    """Digests of the submissions that the trainer's older build could not read."""
    events = peers["trainer"].events
    (resumed, *_) = (at for at, each in enumerate(events) if each["event"] == "trainer.resumed")
    return [e["submission"] for e in events[:resumed] if e["event"] == "trainer.unreadable"]


def _by_role(pairs: Iterable[tuple[str, float]]) -> dict[str, Spread]:
    seconds: dict[str, list[float]] = {}
    for name, each in pairs:
        seconds.setdefault(name.partition("-")[0], []).append(each)
    return {role: spread_of(each) for role, each in seconds.items()}


def _not_accepted(peers: Swarm) -> list[str]:
    return [
        f"{validator.name}: {verdict['failed']}: {verdict['detail']}"
        for validator in peers.of_role("validator")
        for verdict in validator.heard("validator.verdict")
        if verdict["outcome"] != "accepted"
    ]


def _refused_envelopes(peers: Swarm) -> dict[str, int]:
    causes: Counter[str] = Counter()
    for peer in peers.peers.values():
        for event in peer.heard("messenger.dropped"):
            causes[event["cause"]] += 1
        for event in peer.heard("gossip.dropped"):
            causes.update(event["causes"])
    return {cause: n for cause, n in sorted(causes.items()) if cause not in ORDINARY}
