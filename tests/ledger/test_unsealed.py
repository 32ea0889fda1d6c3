"""An epoch that is due and not sealed is reported, with whom it waits for and why."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from swarm.ledger.entries import Sealed
from swarm.sentences import sentence
from tests.ledger.harness import ALICE, BOB, TRAINER, identity
from tests.ledger.test_epochs import Run, a_swarm, everything, honest_block

CAROL = identity(8)

pytestmark = pytest.mark.slow

ROUNDS = 18
"""Looks at the logs until the report."""


async def test_a_seal_that_most_do_not_make_is_reported(tmp_path: Path) -> None:
    swarm = a_swarm(tmp_path, [ALICE, BOB, CAROL])
    async with swarm.peer(TRAINER) as trainer, swarm.peer(ALICE) as alice:
        run = Run(swarm, [trainer, alice])
        async with swarm.peer(BOB), swarm.peer(CAROL):
            await run.advance(30)
            await run.look(rounds=0)
        await run.look(ROUNDS)
        for peer in (trainer, alice):
            (told,) = peer.events("ledger.not_sealed")
            assert told["epoch"] == 0 and told["missing"] == [BOB.peer_id, CAROL.peer_id]
            assert run.starts(peer)[0] == 0


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"epoch": 10**6}, "the next epoch is 0"),
        ({"step": 10**6}, "steps up to 1000000, and credit is final here up to "),
    ],
    ids=["epoch", "step"],
)
async def test_a_first_peer_whose_seal_nobody_can_follow_is_named(
    tmp_path: Path, lie: dict[str, object], reason: str
) -> None:
    async with everything(tmp_path) as (run, trainer, alice, bob):
        await run.advance(50)
        await run.look(rounds=0)
        seal = honest_block(run, trainer)[-1]
        assert isinstance(seal, Sealed)
        await trainer.trusted.append([msgspec.structs.replace(seal, block=0, **lie)])
        await run.look(ROUNDS)
        for peer in (alice, bob):
            (told,) = peer.events("ledger.not_sealed")
            assert told["missing"] == [TRAINER.peer_id] and reason in told["reason"]
            assert reason in (sentence("ledger.not_sealed", told) or "")
            assert run.starts(peer) == [0, 0, 0]


async def test_a_first_peer_that_makes_no_seal_is_named(tmp_path: Path) -> None:
    swarm = a_swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        async with swarm.peer(TRAINER) as trainer:
            run = Run(swarm, [trainer, alice, bob])
            await run.advance(50)
            await run.look(rounds=0)
        await run.look(ROUNDS)
        for peer in (alice, bob):
            (told,) = peer.events("ledger.not_sealed")
            assert told == {"epoch": 0, "missing": [TRAINER.peer_id], "reason": ""}
        await run.look(rounds=8)
        assert len(alice.events("ledger.not_sealed")) == 1, "not at every look"


async def test_nothing_is_reported_while_nothing_is_due(tmp_path: Path) -> None:
    async with everything(tmp_path) as (run, trainer, alice, bob):
        await run.advance(50)
        await run.look(ROUNDS)
        for peer in (trainer, alice, bob):
            assert len(peer.events("ledger.sealed")) == 1
            assert not peer.events("ledger.not_sealed")
