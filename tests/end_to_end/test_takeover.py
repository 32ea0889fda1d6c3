"""The trainer's machine is lost: a standby takes its place by the command that an operator types,
with the newest policy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.end_to_end.harness import STEP_SECONDS, Person, Swarm, swarm

pytestmark = pytest.mark.wall_clock

SWARM = [sys.executable, "-c", "from swarm.commands.main import main; main()"]
NAMES = ["bootstrap", "trainer", "trainer-2", "validator", "inference-1", "inference-2"]
NEW_LINEAGE = 16


async def typed(peers: Swarm, *words: str) -> Person:
    """Type `swarm trainer …` for the standby, and wait until it ends."""
    where = ("--home", str(peers["trainer-2"].home), "--bootstrap", peers["bootstrap"].multiaddr)
    person = Person("operator", [*SWARM, "trainer", *words, *where])
    person.start(peers.nursery)
    await person.ended(STEP_SECONDS)
    return person


async def goes_on(peers: Swarm, marks: dict[str, int]) -> int:
    """Wait until the standby trains and all workers work in the new lineage; return its first
    step."""
    standby = peers["trainer-2"]
    first = await standby.says("trainer.checkpoint_published", lineage=NEW_LINEAGE)
    then = {"lineage": NEW_LINEAGE, "step": first["step"] + 2}
    await standby.says("trainer.checkpoint_published", **then)
    for name in ("inference-1", "inference-2"):
        await peers[name].says("inference.receipt", since=marks[name], outcome="accepted")
    return int(first["step"])


@pytest.mark.slow
async def test_a_standby_takes_over_and_the_trainer_that_returns_stands_by(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async with swarm(tmp_path, base, fork_server, names=NAMES, steps=500) as peers:
        trainer, standby = peers["trainer"], peers["trainer-2"]
        await peers.start()
        await standby.says("shardcast.checkpoint_complete", step=3, seconds=3 * STEP_SECONDS)
        await trainer.kill()
        marks = {name: len(peers[name].events) for name in NAMES}
        forced = await typed(peers, "takeover", "--force")
        assert forced.status.value == 0, forced.complaints
        assert any("this peer was standing by" in line for line in forced.output)
        assert await goes_on(peers, marks) >= 3

        peers.restart("trainer")
        await trainer.says(
            "shardcast.checkpoint_complete", since=marks["trainer"], lineage=NEW_LINEAGE
        )
        assert not trainer.heard("trainer.checkpoint_published", marks["trainer"])
