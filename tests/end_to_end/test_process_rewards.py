"""A run with process rewards: the second model learns, and survives the trainer's death."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from peers.demo.recipes import OBJECTIVE
from peers.learning import states
from peers.learning.implicit import PREFIX
from swarm.wire.manifest import ProcessRewards
from tests.end_to_end.harness import STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts, check_nobody_was_wronged

NAMES = ["bootstrap", "trainer", "validator", "inference-1"]
STEPS = 4


@pytest.mark.slow
def test_a_trainer_killed_in_the_middle_goes_on_with_its_second_model(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    process = ProcessRewards(weight=1.0, learning_rate=1e-3)
    objective = replace(OBJECTIVE, advantage="rloo", process=process)

    async def main() -> None:
        async with swarm(
            tmp_path, base, fork_server, names=NAMES, steps=STEPS, objective=objective
        ) as peers:
            trainer = peers["trainer"]
            await peers.start()
            await trainer.says("trainer.checkpoint_published", step=2, seconds=3 * STEP_SECONDS)
            await trainer.kill()
            newest = max((trainer.home / "trainer/states").glob("0-[0-9]"), key=str)
            assert any(name.startswith(PREFIX) for name in states.shapes(newest))
            since = len(trainer.events)
            trainer.start(peers.nursery, "--resume")
            await trainer.says("trainer.resumed", since=since, seconds=STEP_SECONDS)
            await peers.complete(STEPS * STEP_SECONDS)
            assert not trainer.heard("trainer.rolled_back")
            figures = trainer.heard("trainer.step_trained")
            # The word of the step that had just been published may have died with the trainer.
            assert {each["step"] for each in figures} | {1} == set(range(STEPS))
            # A step whose groups all have equal rewards teaches neither model.
            learned = [each for each in figures if each["trained_tokens"]]
            assert learned[0]["process_loss"] == pytest.approx(0.693, abs=1e-3)
            assert not any(each["process_skipped"] for each in learned)
            assert all(each["process_advantage"] > 0 for each in learned)
            check_nobody_was_wronged(check_accounts(peers))

    trio.run(main)
