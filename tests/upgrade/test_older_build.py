"""Peers of an older build and of this one work together, and take over each other's homes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from swarm.world.home import bar_first_builds, sole_user
from swarm.world.home_format import open_format
from tests.app.harness import NOBODY
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
    old: tuple[str, ...], older: Path, tmp_path: Path, base: Path, fork_server: Path
) -> None:
    """Every account adds up. Work is accepted on both sides of the upgrade; the first builds kept
    no outbox, so a worker of theirs may make the submission under way again, and in other bytes."""

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
                refused = [each["failed"] for each in receipts if each["outcome"] != "accepted"]
                assert refused in ([], ["number"] * (worker.name in old)), refused
                assert receipts[-1]["outcome"] == "accepted"

    trio.run(main)


def test_a_build_without_formats_refuses_a_home_that_this_one_has_opened(
    older: Path, tmp_path: Path
) -> None:
    if (older / "swarm/world/home_format.py").exists():
        pytest.skip("the older build knows formats")
    with sole_user(tmp_path, "relay"):
        open_format(tmp_path)
        bar_first_builds(tmp_path)
    command = [sys.executable, "-m", "swarm.peer", "--role", "relay", "--home", str(tmp_path)]
    done = subprocess.run(
        [*command, "--bootstrap", NOBODY],
        cwd=older,
        env=os.environ | {"PYTHONPATH": str(older)},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    said = f"error: --home {tmp_path} cannot be used (Is a directory); choose another folder\n"
    assert (done.returncode, done.stderr) == (2, said)
