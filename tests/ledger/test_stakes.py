"""Stakes that are kept as the logs grow are those that follow from all entries at once."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from swarm.ledger.entries import decode
from swarm.ledger.state import Authority, Record, ledger_state
from swarm.wire.messages import Evidence
from tests.ledger.harness import ALICE, BOB, OWNER, WORKER, Peer, Swarm, sealed, verdict_at

CHECKED = Evidence(tokens=10)


def expected(peer: Peer, step: int) -> int:
    """The stake by the whole log."""
    run = peer.run_node.run
    log = peer.trusted.log_of(ALICE.peer_id)
    assert log is not None
    records = [
        Record(ALICE.peer_id, index, decode(raw))
        for index, raw in enumerate(log.entries(0, log.size()))
    ]
    authority = Authority.of(run.owners, run.manifest)
    work = ledger_state(records, authority).works.get(WORKER.peer_id)
    return 0 if work is None else work.stake(step, authority.rules)


@pytest.mark.parametrize("seed", range(3))
async def test_a_stake_follows_the_log(tmp_path: Path, seed: int) -> None:
    """With refusals, audits, two files of one number and a window that moves."""
    draw = random.Random(seed)
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice:
        sent: list[tuple[int, int]] = []
        for turn in range(120):
            step = turn * 2 + draw.randrange(-3, 3)
            fate = draw.random()
            if fate > 0.1:  # else an audit of an earlier one, or a second verdict
                sent.append((max(0, step), draw.randrange(3)))
            which = len(sent) - 1 if fate > 0.1 else draw.randrange(len(sent) or 1)
            if not sent:
                continue
            await alice.trusted.append_verdict(
                verdict_at(
                    sent[which][1],
                    submission=which.to_bytes(32, "big"),
                    step=sent[which][0],
                    outcome="refused" if fate > 0.9 else "accepted",
                    evidence=CHECKED if draw.random() < 0.6 else Evidence(),
                    tokens=draw.randrange(1, 100),
                    share=draw.choice([0.1, 0.5, 1.0]),
                )
            )
            if turn % 5 == 0:
                assert alice.trusted.stake(WORKER.peer_id, step) == expected(alice, step)


async def test_no_verdict_is_read_for_a_stake(tmp_path: Path) -> None:
    """Neither after a verdict nor after a restart: the transactions keep the balances."""
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB):
        for step in range(20):
            await alice.trusted.append_verdict(verdict_at(step, step=step, evidence=CHECKED))
        assert alice.trusted.stake(WORKER.peer_id, 20) == 800
        await alice.trusted.append_verdict(verdict_at(99, step=7, evidence=CHECKED))
        assert alice.trusted.stake(WORKER.peer_id, 20) == 840
    async with swarm.peer(ALICE) as alice:
        await alice.node.disk.database("ledger.sqlite").transact(
            lambda connection: connection.execute("DELETE FROM entries")
        )
        assert alice.trusted.stake(WORKER.peer_id, 20) == 840


async def test_other_rules_change_the_stakes(tmp_path: Path) -> None:
    """A fine depends on the safety, and verdicts count only of validators."""
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        for number in range(4):
            await bob.trusted.append_verdict(verdict_at(number, evidence=CHECKED))
        fault = verdict_at(4, outcome="refused", failed="proofs", evidence=CHECKED, share=0.8)
        await bob.trusted.append_verdict(fault)
        await alice.until(lambda: alice.trusted.stake(WORKER.peer_id, 0) == 50, "3 / 0.8 - 1")
        run = alice.run_node.run
        thresholds = msgspec.structs.replace(run.manifest.thresholds, recompute_safety=1.6)
        newer = msgspec.structs.replace(run.manifest, version=2, thresholds=thresholds)
        run.update(sealed(OWNER, newer, run.id))
        await alice.until(lambda: alice.trusted.stake(WORKER.peer_id, 0) == 120, "1.6/0.8 - 1")
        without = msgspec.structs.replace(
            newer, version=3, validators=[v for v in newer.validators if v.peer != BOB.peer_id]
        )
        run.update(sealed(OWNER, without, run.id))
        await alice.until(lambda: alice.trusted.stake(WORKER.peer_id, 0) == 0, "no validator's")


async def test_what_was_accepted_while_the_run_observed_is_no_stake_once_thresholds_are_measured(
    tmp_path: Path,
) -> None:
    """It may be any text, and would let a cheat that came early be recomputed seldom."""
    bet = msgspec.structs.replace(CHECKED, sampler=[0, 0], policy=[0, 0])
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice:
        run = alice.run_node.run
        assert run.manifest.thresholds.observes
        await alice.trusted.append_verdict(verdict_at(0, evidence=CHECKED))
        assert alice.trusted.stake(WORKER.peer_id, 0) == 40
        thresholds = msgspec.structs.replace(run.manifest.thresholds, measured_tokens=1)
        newer = msgspec.structs.replace(run.manifest, version=2, thresholds=thresholds)
        run.update(sealed(OWNER, newer, run.id))
        await alice.until(lambda: alice.trusted.stake(WORKER.peer_id, 0) == 0, "no bets")
        await alice.trusted.append_verdict(verdict_at(1, evidence=bet))
        assert alice.trusted.stake(WORKER.peer_id, 0) == 40 == expected(alice, 0)
