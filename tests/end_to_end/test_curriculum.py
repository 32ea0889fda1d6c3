"""A curriculum that follows the accuracy: worker, validator and trainer agree on its level."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path

import msgspec
import pytest
import trio

from swarm.look.rollouts.filters import Filters
from swarm.look.rollouts.sources import open_source
from swarm.wire.manifest import Curriculum, EnvironmentReference
from swarm.wire.messages import StepOrder
from tests.end_to_end.harness import STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts

NAMES = ["bootstrap", "trainer", "validator", "inference-1"]
STEPS = 10
LEVELS = ["first", "second", "third"]
"""Columns of the data: the same digits in orders that show the level of a prompt."""

RULE = Curriculum(option="prompt_column", values=[*LEVELS], raise_at=0.001, groups=4)
"""Groups that are trained on have at least one right answer, so each batch raises the level."""


def write_digits(path: Path) -> None:
    """Rows with six different digits each, which all levels ask to sort."""
    chance = random.Random(0)
    with path.open("w") as file:
        for _ in range(4096):
            digits = chance.sample("0123456789", 6)
            outer, inner = sorted((digits[0], digits[5])), sorted((digits[1], digits[4]))
            row = {"answer": "".join(sorted(digits))}
            for column, order in zip(LEVELS, [(1, 1), (-1, 1), (-1, -1)], strict=True):
                (digits[0], digits[5]), (digits[1], digits[4]) = (
                    outer[:: order[0]],
                    inner[:: order[1]],
                )
                row[column] = "".join(digits) + ">"
            file.write(json.dumps(row) + "\n")


def level_of(prompt: str) -> int:
    """The level that asks so."""
    asked = prompt.removeprefix("<bos>")
    return 0 if asked[0] < asked[5] else 1 if asked[1] < asked[4] else 2


def levels_by_step(trainer: Path) -> dict[int, int]:
    """The level in the trainer's signed order of each step."""
    with sqlite3.connect(f"file:{trainer / 'trainer.sqlite'}?mode=ro", uri=True) as database:
        rows = database.execute("SELECT message FROM orders").fetchall()
    orders = [msgspec.msgpack.decode(raw, type=StepOrder) for (raw,) in rows]
    return {order.step: order.levels[0] if order.levels else 0 for order in orders}


@pytest.mark.slow
def test_the_level_rises_with_the_accuracy_and_outlives_the_trainer(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    write_digits(tmp_path / "digits.jsonl")
    options = {"path": str(tmp_path / "digits.jsonl"), "prompt_column": LEVELS[0]}
    environment = EnvironmentReference(
        name="dataset", version="1", options={**options}, curriculum=RULE
    )

    async def main() -> None:
        async with swarm(
            tmp_path, base, fork_server, names=NAMES, steps=STEPS, environment=environment
        ) as peers:
            trainer = peers["trainer"]
            await peers.start()
            raised = await trainer.says("trainer.level_changed", seconds=3 * STEP_SECONDS)
            assert raised["level"] == 1
            await trainer.says("trainer.step_opened")
            await trainer.kill()
            peers.restart("trainer")
            await peers.complete(STEPS * STEP_SECONDS)
            accounts = check_accounts(peers)
            totals = accounts.state.totals[peers["inference-1"].identity.peer_id]
            assert totals.accepted > 0 and totals.refused == totals.quarantined == 0

            ordered = levels_by_step(trainer.home)
            steps = sorted(ordered)
            assert [ordered[step] for step in steps] == sorted(ordered.values()), ordered
            assert ordered[steps[0]] == 0 and ordered[steps[-1]] == len(LEVELS) - 1, ordered
            seen: set[int] = set()
            for rollout in open_source(peers["validator"].home).rollouts(Filters()):
                level = ordered[rollout.submission.step]
                prompt = rollout.turns[0].text
                assert prompt is not None and level == level_of(prompt), prompt
                seen.add(level)
            assert len(seen) > 1, seen

    trio.run(main)
