"""A run whose environment is a program that calls an endpoint; only an environment peer has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from peers.endpoint import harness
from swarm.wire.manifest import EnvironmentReference
from tests.end_to_end.harness import START_SECONDS, STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts

NAMES = ["bootstrap", "trainer", "validator", "environment", "inference"]
STEPS = 3
TASKS = 8


def sorting(folder: Path) -> EnvironmentReference:
    """The shipped example on a data set of six digits each."""
    numbers = [f"{(123457 * index) % 10**6:06d}" for index in range(1, TASKS + 1)]
    rows = [{"prompt": f"{each}>", "answer": "".join(sorted(each))} for each in numbers]
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = Path(harness.__file__).parent / "example.py"
    return EnvironmentReference(
        name="harness",
        version="1",
        where="served",
        options={"path": str(path), "program": str(program)},
    )


@pytest.mark.slow
def test_a_program_that_calls_an_endpoint_is_trained_in(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        async with swarm(
            tmp_path,
            base,
            fork_server,
            names=NAMES,
            steps=STEPS,
            environment=sorting(tmp_path),
            settings={"environment": {"children": 1}},
        ) as peers:
            await peers.start()
            await peers.complete(START_SECONDS + STEPS * STEP_SECONDS)
            accounts = check_accounts(peers)
            totals = accounts.state.totals[peers["inference"].identity.peer_id]
            assert totals.accepted > 0
            assert totals.refused == totals.quarantined == 0
            trained = peers["trainer"].heard("trainer.step_trained")
            assert any(0 < event["reward"] < 1 for event in trained), "as the program posted them"

    trio.run(main)
