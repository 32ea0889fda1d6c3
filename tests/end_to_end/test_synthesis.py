"""A run that trains nothing: its workers' solutions become a data set with credits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
from typer.testing import CliRunner

from peers.engines.model import read_weights
from swarm.commands.main import app
from swarm.wire.manifest import Objective
from tests.end_to_end.harness import STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts

NAMES = ["bootstrap", "trainer", "validator", "inference-1", "inference-2"]
STEPS = 2


@pytest.mark.slow
def test_workers_generate_a_data_set_with_credits(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        async with swarm(
            tmp_path,
            base,
            fork_server,
            names=NAMES,
            steps=STEPS,
            objective=Objective(name="synthesis"),
        ) as peers:
            await peers.start()
            policy = await peers.complete(STEPS * STEP_SECONDS)
            before, after = read_weights(base), read_weights(policy)
            assert all(before[name].equal(after[name]) for name in before)
            totals = check_accounts(peers).state.totals
            workers = {each.identity.peer_id for each in peers.of_role("inference")}
            arguments = ["synthesize", "--rollouts", str(peers["trainer"].home), "--reward", "0:"]
            arguments += ["--unfinished", "--out", str(tmp_path / "data"), "--json"]
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.output
            told = json.loads(result.stdout)
            assert told["solutions"] >= STEPS * 8 * 4 and told["kept"] > 0
            for name, credit in told["credits"].items():
                assert name in workers
                assert credit["solutions"] <= 8 * totals[name].accepted * 4

    trio.run(main)
