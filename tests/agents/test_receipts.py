"""An agent of a library earns receipts: a run whose environment it is, with real processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trio

from tests.agents.policy import make_caller
from tests.agents.test_agents import harness
from tests.end_to_end.harness import REPOSITORY, START_SECONDS, running_fork_server, swarm
from tests.end_to_end.ledgers import check_accounts

pytestmark = pytest.mark.agents
torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower

NAMES = ["bootstrap", "trainer", "validator", "environment", "inference"]
STEPS = 1
STEP_SECONDS = 600.0
"""Deadline of one step: each of its 32 episodes starts a Python that imports the library."""


@pytest.fixture
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with running_fork_server(tmp_path_factory.mktemp("fork")) as path:
        yield path


def test_an_agent_of_openai_agents_earns_receipts(tmp_path: Path, fork_server: Path) -> None:
    """The contributor's peer has neither the library nor the agent: it answers what it asks."""
    make_caller(tmp_path / "base", doubt=0.3)
    name, rows = "openai_agents", 4

    async def main() -> None:
        async with swarm(
            tmp_path / "swarm",
            tmp_path / "base",
            fork_server,
            names=NAMES,
            steps=STEPS,
            environment=harness(tmp_path, name, rows),
            sampling={"max_new_tokens": 96},
            settings={"environment": {"children": 2}},
        ) as peers:
            await peers.start()
            await peers.complete(START_SECONDS + STEPS * STEP_SECONDS)
            worker = peers["inference"].identity.peer_id
            totals = check_accounts(peers).state.totals[worker]
            assert totals.accepted > 0
            assert totals.refused == totals.quarantined == 0
            for event in peers["trainer"].heard("trainer.step_trained"):
                assert 0 < event["reward"] < 1, "as the agent posted them"
            where = ["--bootstrap", peers["bootstrap"].multiaddr, "--peer", worker]
            shown = await trio.run_process(
                [sys.executable, "-m", "swarm.commands.main", "ledger", *where],
                cwd=REPOSITORY,
                capture_stdout=True,
            )
            print(shown.stdout.decode())
            assert "each of them in its validator's log" in shown.stdout.decode()

    trio.run(main)
