"""Rewards, advantages or masks of the worker's own.

Harmless: the file has no field for them, a column that the format does not know is refused by
`schema` (a proven fault), and the validator grades every completion itself.

Cost: the swarm reads one file; the cheat's identity.
"""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq

from swarm.rollouts import submission_file
from tests.attacks.models import Arena


def test_a_column_of_rewards_is_a_proven_fault(arena: Arena) -> None:
    order = arena.order(0)
    header, rollouts = arena.honest_file(order)
    path = arena.stage.folder / "with rewards"
    submission_file.write(path, rollouts, header)
    table = pq.read_table(path)
    forged = table.append_column("reward", pa.array([1.0] * len(table), pa.float32()))
    file = io.BytesIO()
    pq.write_table(forged, file)
    found = arena.stage.inspect_bytes(file.getvalue())
    assert (found.failed, found.proven_fault) == ("schema", True)


def test_rewards_are_the_validators(arena: Arena) -> None:
    order = arena.order(0)
    _, rollouts = arena.honest_file(order)
    found, _ = arena.judge(order, rollouts)
    work = arena.work(order)
    completions = [rollouts.rollout(row).model_tokens for row in range(len(rollouts))]
    graded = [work.rewards(row, completion) for row, completion in enumerate(completions)]
    assert [reward for group in found.rewards for reward in group] == graded
