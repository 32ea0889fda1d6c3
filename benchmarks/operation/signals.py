"""Every peer of a real swarm is asked to leave, later killed at a random instant, and starts again.

Eight processes on loopback (bootstrap, relay, trainer, two validators, the environment peer that
plays and grades, two workers) train the demo's tiny model. Each in turn, in a drawn order, gets
SIGTERM after a step, then each in turn SIGKILL together with its children. A second later it is
started again on the same home. When the run is over, the trusted peers' logs are compared with what
the workers handed in.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import msgspec
import trio

from benchmarks.operation.handed_in import SETTLE_SECONDS, delivered, lost, receipts, settle
from benchmarks.operation.report import Spread, spread_of
from benchmarks.real_swarm import prepared
from peers.demo.recipes import ENVIRONMENT
from swarm.look.health import HEALTH
from tests.end_to_end.harness import Swarm, processes_with, swarm
from tests.end_to_end.ledgers import check_accounts, check_nobody_was_wronged

NAMES = [
    "bootstrap",
    "relay",
    "trainer",
    "validator-1",
    "validator-2",
    "environment",
    "inference-1",
    "inference-2",
]
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
SEED = 0
STEPS = 204
"""Steps of the run: a restart every twelve of them, since the others work on meanwhile."""
AWAY_SECONDS = 1.0
"""Between a peer's end and its next start, as a supervisor waits."""

WITHIN_STEP_SECONDS = 1.0
"""SIGKILL comes at a random instant of this interval after a step."""

DEADLINE_SECONDS = 240.0
"""For a step, a start, or an end."""

READY = {
    "bootstrap": "peer.listening",
    "relay": "membership.admitted",
    "inference": "membership.admitted",
}
"""Event with which a peer of a role takes part again; of trusted ones, whom nobody admits,
`peer.status`."""


class Restart(msgspec.Struct, frozen=True):
    """One signal to one peer."""

    peer: str
    by: str
    step: int
    """Policies published before."""
    ended_after: float
    """Seconds from the signal to the end of the process."""
    away: float
    """Seconds from the signal until it took part again."""
    in_flight: int
    """Submissions acknowledged by a validator and without a receipt, at the signal."""
    status: int
    """Exit status: 0, or minus the number of the signal that killed it."""


class Signals(msgspec.Struct, frozen=True):
    """What happened, and what was lost."""

    restarts: list[Restart]
    away_by_sigterm: Spread
    away_by_sigkill: Spread
    steps: int
    submissions: int
    """Handed in: acknowledged by a validator."""
    without_verdict: int
    without_receipt: int
    """Of those with a verdict."""
    orphans: int
    """Processes that outlived a peer that was asked to leave, or the swarm."""
    temporary_files: list[str]
    """Left in the temporary folder and, unfinished, in homes."""


def measure() -> Signals:
    # The folder of the peers and their children; set before the fork server starts.
    with tempfile.TemporaryDirectory(prefix="swarm-signals-") as scratch:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = scratch
        try:
            measured = trio.run(_measure, Path(scratch))
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
        orphans = processes_with(scratch)
        return msgspec.structs.replace(measured, orphans=measured.orphans + len(orphans))


async def _measure(scratch: Path) -> Signals:
    served = msgspec.structs.replace(ENVIRONMENT, where="served")
    with prepared() as (folder, base, fork_server):
        made = swarm(folder, base, fork_server, names=NAMES, steps=STEPS, environment=served)
        async with made as peers:
            await peers.start()
            restarts, orphans = await _signal_each(peers)
            await peers.complete(DEADLINE_SECONDS)
            await settle(peers)
            for peer in [peers["trainer"], *peers.of_role("inference")]:
                await peer.ended(SETTLE_SECONDS)
            accounts = check_accounts(peers)  # nothing trained on twice, nothing accepted lost
            check_nobody_was_wronged(accounts)
            without_verdict, without_receipt = lost(peers, accounts)
            left = [peer for peer in peers.peers.values() if peer.status.value is None]
            for peer in left:
                peer.send(signal.SIGTERM)
            for peer in left:
                await peer.ended(SETTLE_SECONDS)
                orphans += len(peer.left_behind)
            homes = [peer.home for peer in peers.peers.values()]
            return Signals(
                restarts=restarts,
                away_by_sigterm=_away(restarts, signal.SIGTERM),
                away_by_sigkill=_away(restarts, signal.SIGKILL),
                steps=STEPS,
                submissions=len(delivered(peers)),
                without_verdict=len(without_verdict),
                without_receipt=len(without_receipt),
                orphans=orphans,
                temporary_files=_temporary_files(scratch, folder, homes),
            )


async def _signal_each(peers: Swarm) -> tuple[list[Restart], int]:
    """Send every signal to every peer, one per step; also count the orphans."""
    chance = random.Random(SEED)
    restarts, orphans, step = [], 0, 1
    for which in SIGNALS:
        for name in chance.sample(NAMES, len(NAMES)):
            published = peers["trainer"].says
            await published("trainer.checkpoint_published", step=step, seconds=DEADLINE_SECONDS)
            if which is signal.SIGKILL:
                await trio.sleep(chance.uniform(0, WITHIN_STEP_SECONDS))
            restarts.append(await _restart(peers, name, which, step))
            if which is signal.SIGTERM:
                orphans += len(peers[name].left_behind)
            step += STEPS // (1 + len(SIGNALS) * len(NAMES))
    return restarts, orphans


async def _restart(peers: Swarm, name: str, which: signal.Signals, step: int) -> Restart:
    peer = peers[name]
    assert peer.status.value is None, f"{name} ended by itself: {peer.complaints[-3:]}"
    in_flight = len(delivered(peers) - receipts(peers))
    began = time.monotonic()
    if which is signal.SIGKILL:
        await peer.kill()
    else:
        peer.send(which)
    status = await peer.ended(DEADLINE_SECONDS)
    ended_after, since = time.monotonic() - began, len(peer.events)
    if which is signal.SIGTERM:
        assert not (peer.home / HEALTH).exists(), f"{name} left its health file"
    await trio.sleep(AWAY_SECONDS)
    peers.restart(name)
    event = READY.get(peer.role, "peer.status")
    await peer.says(event, since=since, seconds=DEADLINE_SECONDS)
    away = time.monotonic() - began
    return Restart(name, which.name, step, round(ended_after, 2), round(away, 2), in_flight, status)


def _away(restarts: list[Restart], which: signal.Signals) -> Spread:
    return spread_of(each.away for each in restarts if each.by == which.name)


def _temporary_files(scratch: Path, folder: Path, homes: list[Path]) -> list[str]:
    left = [path.name for path in scratch.iterdir() if path != folder]
    for home in homes:
        left += [str(p.relative_to(folder)) for p in home.rglob("*") if ".partial" in p.name]
    return sorted(left)
