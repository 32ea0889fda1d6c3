"""A run with VinePPO's values: real workers continue states, and the trainer uses their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from swarm.wire.manifest import Values
from tests.end_to_end.harness import swarm

STEPS = 5


@pytest.mark.slow
def test_workers_continue_states_and_the_trainer_uses_the_values(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        names = ["bootstrap", "trainer", "validator", "inference-1", "inference-2"]
        values = Values(estimate="continuations", segment_tokens=2)
        async with swarm(
            tmp_path, base, fork_server, names=names, steps=STEPS, values=values
        ) as peers:
            trainer = peers["trainer"]
            await peers.start(*names)
            await trainer.says("trainer.run_complete")
            for worker in peers.of_role("inference"):
                await worker.says("inference.receipt", outcome="accepted")
                assert not worker.heard("inference.receipt", outcome="refused")
            trained = trainer.heard("trainer.step_trained")
            assert [event["step"] for event in trained] == list(range(STEPS))
            assert sum(event.get("states_valued", 0) for event in trained) > 0
            assert sum(event.get("left_out_continuation", 0) for event in trained) > 0

    trio.run(main)
