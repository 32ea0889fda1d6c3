"""An alarm rolls the run back to its last good state, in a new lineage; the next one pauses it."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import trio

from peers.demo.recipes import ENVIRONMENT, Warmup
from peers.demo.setup import write_config
from peers.demo.warmup import warm_up
from peers.environments import load
from peers.trainer.settings import TrainerSettings
from swarm.ledger.entries import CheckpointPublished, Consumed
from swarm.wire.manifest import Objective
from tests.end_to_end.harness import STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_nobody_was_wronged, read_accounts

NAMES = ["bootstrap", "relay", "trainer", "validator", "inference-1", "inference-2"]


@pytest.mark.slow
def test_an_alarm_rolls_back_then_pauses_and_a_person_goes_on(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        steps = 64  # the second alarm comes some 20 steps after the first; gradients decide when
        nervous = {
            "alarm_action": "rollback",
            "alarm_gradient_norm": 1.0001,  # any ordinary step raises the alarm
            "alarm_entropy": 1.0001,
            "states_every": 4,
            "rollbacks_max": 1,
        }
        async with swarm(
            tmp_path, base, fork_server, names=NAMES, steps=steps, settings={"trainer": nervous}
        ) as peers:
            trainer = peers["trainer"]
            await peers.start()
            alarm = await trainer.says("trainer.alarm", seconds=steps * STEP_SECONDS)
            back = await trainer.says("trainer.rolled_back")
            assert back["lineage"] == 1
            assert back["step"] <= alarm["step"] + 1 - 5 and back["step"] % 4 == 0
            await trainer.says("trainer.checkpoint_published", lineage=1, step=back["step"] + 1)

            paused = await trainer.says("trainer.paused", seconds=steps * STEP_SECONDS)
            alarmed = re.search(r"step (\d+): ", paused["reason"])
            assert alarmed is not None
            newest = int(alarmed[1]) + 1  # it is published by another task than the one that pauses
            await trainer.says("trainer.checkpoint_published", lineage=1, step=newest)
            closed = await trainer.says(
                "trainer.step_opened", since=trainer.events.index(paused), groups_wanted=0
            )
            assert closed["step"] >= newest

            await trainer.kill()
            reporting = {"model": str(base), "alarm_action": "report"}  # its reward is mostly noise
            write_config(trainer.home / "settings.toml", "trainer", reporting)
            since = len(trainer.events)
            peers.restart("trainer")
            resumed = await trainer.says("trainer.resumed", since=since)
            assert newest - 5 < resumed["step"] <= newest  # the rest is repeated
            await peers.complete(steps * STEP_SECONDS)
            assert await trainer.ended(30) == 0

            accounts = read_accounts(peers)
            check_nobody_was_wronged(accounts)
            own = [r.entry for r in accounts.records if r.owner == trainer.identity.peer_id]
            consumed = Counter(entry.submission for entry in own if isinstance(entry, Consumed))
            assert set(consumed.values()) == {1}, "trained on twice, or stale and trained on"
            assert consumed.keys() <= accounts.accepted.keys()
            published = [(e.lineage, e.step) for e in own if isinstance(e, CheckpointPublished)]
            assert published == [
                *((0, step) for step in range(alarm["step"] + 2)),
                *((1, step) for step in range(back["step"], steps + 1)),
            ]

    trio.run(main)


@pytest.mark.slow
def test_a_run_whose_objective_makes_it_collapse_goes_back_once_and_goes_on(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    """By the default action. The bonus for entropy is so large that only noise is learned."""
    able = tmp_path / "able"  # its reward is high enough to fall
    shutil.copytree(base, able)
    warm_up(able, [load(ENVIRONMENT.name, ENVIRONMENT.version)], 0, Warmup(accuracy=0.3))
    noise = Objective(entropy_coefficient=10.0, kl_coefficient=0.0)

    async def main() -> None:
        steps = 40
        async with swarm(
            tmp_path,
            able,
            fork_server,
            names=NAMES,
            steps=steps,
            objective=noise,
            settings={"trainer": {"alarm_action": TrainerSettings(model="base").alarm_action}},
        ) as peers:
            trainer = peers["trainer"]
            await peers.start()
            back = await trainer.says("trainer.rolled_back", seconds=steps * STEP_SECONDS)
            assert "the reward has collapsed" in back["reason"]
            assert "a further collapse is only reported" in back["reason"]
            await peers.complete(steps * STEP_SECONDS)
            assert await trainer.ended(30) == 0
            alarms = [each for each in trainer.heard("trainer.alarm") if each["sign"] == "reward"]
            assert back["lineage"] == 1 and 0 < back["step"] <= alarms[0]["step"] - 4
            assert len(trainer.heard("trainer.rolled_back")) == 1
            assert not trainer.heard("trainer.paused")
            check_nobody_was_wronged(read_accounts(peers))

    trio.run(main)
