"""A worker that cheats is evicted; another validator replaces one that falls silent."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from swarm.ledger.entries import Judged
from swarm.wire.manifest import Limits
from tests.end_to_end.harness import START_SECONDS, STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts, check_nobody_was_wronged

pytestmark = pytest.mark.wall_clock


@pytest.mark.slow
async def test_a_worker_with_altered_weights_is_refused_and_put_out(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    steps = 8
    names = ["bootstrap", "relay", "trainer", "validator", "inference-1", "inference-2"]
    cheating = {"inference-2": {"alter_weights": 0.1}}
    async with swarm(
        tmp_path, base, fork_server, names=names, steps=steps, settings=cheating
    ) as peers:
        await peers.start()
        cheater = peers["inference-2"]
        receipt = await cheater.says("inference.receipt", outcome="refused")
        assert receipt["failed"] in ("proofs", "sampling", "margins")
        assert receipt["figure"] != receipt["threshold"]
        validator = peers["validator"]
        await validator.says("membership.peer_evicted", remote=cheater.identity.peer_id)
        assert await cheater.ended(STEP_SECONDS) == 2
        assert len(cheater.complaints) == 1, cheater.complaints
        assert "evicted" in cheater.complaints[0]
        print(receipt, cheater.complaints)
        await peers.complete(steps * STEP_SECONDS)
        assert await peers["trainer"].ended(30) == 0
        accounts = check_accounts(peers)
        assert accounts.evicted() == {cheater.identity.peer_id}
        totals = accounts.state.totals
        assert totals[cheater.identity.peer_id].accepted == 0
        assert totals[peers["inference-1"].identity.peer_id].refused == 0


@pytest.mark.long
async def test_the_next_validator_takes_over_from_a_silent_one(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    """And the silent one, once it is back, from the next one when that is killed.

    Each wait ends with progress that the other validator cannot have made. So the deadlines only
    have to be long enough for a busy machine.
    """
    steps = 20
    names = ["bootstrap", "trainer", "validator-1", "validator-2", "inference-1", "inference-2"]
    limits = Limits(acknowledgement_seconds=3.0, verdict_seconds=6.0)
    async with swarm(tmp_path, base, fork_server, names=names, steps=steps, limits=limits) as peers:
        trainer, silent, other = peers["trainer"], peers["validator-1"], peers["validator-2"]

        async def train_three_steps() -> None:
            reached = len(trainer.heard("trainer.step_trained"))
            assert reached + 3 < steps
            await trainer.says("trainer.step_trained", step=reached + 3, seconds=5 * STEP_SECONDS)

        await peers.start("bootstrap", "validator-1", "validator-2")
        for validator in (silent, other):  # else the run may be over before both judge
            await validator.says("peer.listening", seconds=START_SECONDS)
        await peers.start("trainer", "inference-1", "inference-2")
        for validator in (silent, other):
            await validator.says("validator.verdict", seconds=2 * START_SECONDS)
        silent.send(signal.SIGSTOP)
        await train_three_steps()
        silent.send(signal.SIGCONT)
        await other.kill()
        await train_three_steps()
        peers.restart("validator-2")
        await peers.complete(steps * STEP_SECONDS)
        assert await trainer.ended(30) == 0
        accounts = check_accounts(peers)
        check_nobody_was_wronged(accounts)
        judged = [
            (record.owner, record.entry.submission)
            for record in accounts.records
            if isinstance(record.entry, Judged)
        ]
        print("verdicts:", Counter(owner for owner, _ in judged))
        assert {owner for owner, _ in judged} == set(peers.validators)
        assert set(accounts.state.verdicts) == {submission for _, submission in judged}
