"""A worker that cheats is evicted; another validator replaces one that falls silent."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
import trio

from swarm.ledger.entries import Judged
from swarm.messages import Limits
from tests.end_to_end.harness import START_SECONDS, STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts


@pytest.mark.slow
def test_a_worker_with_altered_weights_is_refused_and_put_out(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
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

    trio.run(main)


@pytest.mark.slow
def test_the_next_validator_takes_over_from_a_silent_one(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        steps = 10
        names = ["bootstrap", "trainer", "validator-1", "validator-2", "inference-1", "inference-2"]
        limits = Limits(acknowledgement_seconds=2.0, verdict_seconds=3.0)
        async with swarm(
            tmp_path, base, fork_server, names=names, steps=steps, limits=limits
        ) as peers:
            await peers.start()
            trainer, silent, other = peers["trainer"], peers["validator-1"], peers["validator-2"]
            for validator in (silent, other):
                await validator.says("validator.verdict", seconds=START_SECONDS)
            silent.send(signal.SIGSTOP)
            reached = len(trainer.heard("trainer.step_trained"))
            await trainer.says("trainer.step_trained", step=reached + 3)
            silent.send(signal.SIGCONT)
            since = len(silent.events)
            await silent.says("validator.verdict", since=since)
            await peers.complete(steps * STEP_SECONDS)
            assert await trainer.ended(30) == 0
            accounts = check_accounts(peers)
            by_submission = Counter(
                r.entry.submission for r in accounts.records if isinstance(r.entry, Judged)
            )
            print("judged by both:", sum(n > 1 for n in by_submission.values()))
            assert set(accounts.state.verdicts) == set(by_submission)
            for totals in accounts.state.totals.values():
                assert totals.refused == totals.quarantined == 0, accounts.state

    trio.run(main)
