"""A run whose teacher is its own base, and reads the tasks' answers before each completion."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from swarm.wire.manifest import Objective
from tests.end_to_end.harness import swarm

STEPS = 2


@pytest.mark.slow
def test_the_trainer_finds_the_task_of_each_accepted_rollout(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        names = ["bootstrap", "trainer", "validator", "inference-1"]
        objective = Objective(teacher_weight=0.5, teacher_prompt="{answer}={prompt}")
        async with swarm(
            tmp_path, base, fork_server, names=names, steps=STEPS, objective=objective
        ) as peers:
            trainer = peers["trainer"]
            await peers.start(*names)
            await trainer.says("trainer.run_complete")
            for event in trainer.heard("trainer.step_trained"):
                assert event["untaught"] == 0 and event["kl_teacher"] != 0

    trio.run(main)
