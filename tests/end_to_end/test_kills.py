"""Peers die by SIGKILL at any moment; the run continues, loses nothing and repeats nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.harness import STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts, check_nobody_was_wronged

pytestmark = pytest.mark.wall_clock

NAMES = ["bootstrap", "relay", "trainer", "validator", "inference-1", "inference-2"]
LIFE_SECONDS = 60.0
"""Deadline for a trainer to resume, train a step, and die."""


@pytest.mark.slow
async def test_every_child_is_killed_once_and_no_peer_ends(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    steps = 12
    async with swarm(tmp_path, base, fork_server, names=NAMES, steps=steps) as peers:
        await peers.start()
        trainer = peers["trainer"]
        step = 2
        for name, child in [
            ("inference-1", "engine"),
            ("validator", "inspector"),
            ("validator", "prefill"),
            ("trainer", "trainer"),
            ("trainer", "trainer"),
        ]:
            await trainer.says("trainer.checkpoint_published", step=step)
            since = len(peers[name].events)
            os.kill(peers[name].children()[child], signal.SIGKILL)
            await peers[name].says("compute.child_restarted", since=since, name=child)
            step += 2
        await peers.complete(steps * STEP_SECONDS)
        for peer in [trainer, *peers.of_role("inference")]:
            assert await peer.ended(30) == 0, peer.complaints
        assert peers["validator"].status.value is None
        check_nobody_was_wronged(check_accounts(peers))


MOMENTS = [
    "before-outcomes-kept",
    "before-save",
    "after-copy",
    "during-save+1",
    "during-save+10",
    "during-save+25",
    "during-save+60",
    "after-save",
    "after-log",
    "after-export",
    "after-announcement",
    "before-drop",
    "after-drop",
]


@pytest.mark.slow
async def test_the_trainer_dies_at_every_moment_of_a_step(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    steps = 4 * len(MOMENTS) + 2  # a life may take further steps while one is published
    async with swarm(tmp_path, base, fork_server, names=NAMES, steps=steps) as peers:
        await peers.start()
        trainer = peers["trainer"]
        await trainer.says("trainer.checkpoint_published", step=1)
        await trainer.kill()
        for moment in MOMENTS:
            # Two steps per process, since the first one after a resumption leaves other state.
            peers.restart("trainer", ["tests.end_to_end.dying_trainer", moment, "2"])
            assert await trainer.ended(LIFE_SECONDS) == -9, moment
        since = len(trainer.events)
        peers.restart("trainer")
        await trainer.says("trainer.resumed", since=since)
        await peers.complete(steps * STEP_SECONDS)
        assert await trainer.ended(30) == 0
        check_nobody_was_wronged(check_accounts(peers))
