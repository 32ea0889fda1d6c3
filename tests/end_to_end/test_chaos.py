"""Peers die at random moments, also several at once. The seed decides which peers and when."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from tests.end_to_end.harness import STEP_SECONDS, Swarm, swarm
from tests.end_to_end.ledgers import check_accounts, check_nobody_was_wronged

STEPS = 42
DEATHS = 8
MORTAL = ["relay", "trainer", "validator-1", "validator-2", "inference-1", "inference-2"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_random_deaths(seed: int, tmp_path: Path, base: Path, fork_server: Path) -> None:
    chance = random.Random(seed)

    async def die_and_return(peers: Swarm, name: str) -> None:
        status = peers[name].status.value
        if status is not None:
            assert status == 0, peers[name].complaints  # the run ended first
            return
        await peers[name].kill()
        await trio.sleep(chance.uniform(0, 2))  # downtime of the machine
        peers.restart(name)

    async def main() -> None:
        names = ["bootstrap", *MORTAL]
        async with swarm(tmp_path, base, fork_server, names=names, steps=STEPS) as peers:
            await peers.start()
            trainer = peers["trainer"]
            for death in range(DEATHS):
                await trainer.says("trainer.checkpoint_published", step=2 + 4 * death)
                await trio.sleep(chance.uniform(0, 1))  # any moment of a step
                async with trio.open_nursery() as nursery:
                    for name in chance.sample(MORTAL, chance.choice([1, 1, 2])):
                        nursery.start_soon(die_and_return, peers, name)
            await peers.complete(STEPS * STEP_SECONDS)
            assert await trainer.ended(30) == 0
            check_nobody_was_wronged(check_accounts(peers))

    trio.run(main)
