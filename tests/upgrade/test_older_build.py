"""Peers of an older build and of this one work together, and take over each other's homes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import trio

from tests.end_to_end.harness import REPOSITORY, START_SECONDS, STEP_SECONDS, Swarm, swarm
from tests.end_to_end.ledgers import check_accounts, check_nobody_was_wronged

NAMES = ["bootstrap", "trainer", "validator", "inference-1"]
LEAVING_SECONDS = 60.0

pytestmark = pytest.mark.upgrade


async def replaced(peers: Swarm, name: str, build: Path) -> None:
    """Stop a peer by SIGTERM, and start another build on its home."""
    peer = peers[name]
    peer.send(signal.SIGTERM)
    assert await peer.ended(LEAVING_SECONDS) == 0, peer.complaints
    peer.build = build
    peers.restart(name)


async def works(peers: Swarm, name: str, since: int = 0) -> None:
    """Wait until a peer has done its part in the run."""
    seconds = 2 * (START_SECONDS + STEP_SECONDS)
    done = {"inference": "inference.receipt", "trainer": "trainer.checkpoint_published"}
    event = done.get(peers[name].role, "peer.listening")
    await peers[name].says(event, seconds=seconds, since=since)


@pytest.mark.parametrize(
    "old",
    [("inference-1",), ("validator", "bootstrap"), ("trainer",)],
    ids=["old-worker", "old-validator", "old-trainer"],
)
def test_builds_work_together_and_homes_are_taken_over(
    old: tuple[str, ...],
    older: Path,
    tmp_path: Path,
    base: Path,
    fork_server: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every account adds up, and work is accepted on both sides of the upgrade. The run's owner has
    signed it with the older build, so it needs that one's protocol version."""
    monkeypatch.setattr("swarm.run.manifest.PROTOCOL_VERSION", 2)

    async def main() -> None:
        async with swarm(tmp_path, base, fork_server, names=NAMES, steps=12) as peers:
            for name in old:
                peers[name].build = older
            await peers.start()
            for name in NAMES:
                await works(peers, name)
            for name in old:
                since = len(peers[name].events)
                await replaced(peers, name, REPOSITORY)
                await works(peers, name, since)
            await peers.complete(14 * STEP_SECONDS)
            accounts = check_accounts(peers)
            check_nobody_was_wronged(accounts)
            for worker in peers.of_role("inference"):
                receipts = worker.heard("inference.receipt")
                assert {each["outcome"] for each in receipts} == {"accepted"}

    trio.run(main)
