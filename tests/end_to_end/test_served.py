"""A run whose environment only two environment peers have; one of them dies on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.end_to_end.harness import STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts
from tests.environment.served import SORTING, install

NAMES = ["bootstrap", "trainer", "validator", "environment-1", "environment-2", "inference-1"]
STEPS = 4


@pytest.mark.slow
def test_workers_train_in_an_environment_that_they_lack(
    tmp_path: Path, base: Path, fork_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = install(tmp_path / "site")
    with monkeypatch.context() as owner:
        owner.syspath_prepend(site)  # the owner signs the manifest, and no other peer has it
        made = swarm(
            tmp_path, base, fork_server, names=NAMES, steps=STEPS, environment=SORTING, site=site
        )

        async def main() -> None:
            async with made as peers:
                await peers.start()
                await peers["trainer"].says("trainer.step_trained", step=1)
                await peers["environment-1"].kill()
                await peers.complete(STEPS * STEP_SECONDS)
                accounts = check_accounts(peers)
                worker = peers["inference-1"].identity.peer_id
                totals = accounts.state.totals[worker]
                assert totals.accepted > 0
                assert totals.refused == totals.quarantined == 0

        trio.run(main)
