"""Stakes that are kept as the logs grow are those that follow from all entries at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from swarm.ledger.entries import decode
from swarm.ledger.state import Authority, Record, ledger_state
from swarm.messages import Evidence
from tests.ledger.harness import ALICE, BOB, WORKER, Peer, Swarm, in_virtual_time, verdict_at

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
    authority = Authority.of(run.owner, run.manifest)
    work = ledger_state(records, authority).works.get(WORKER.peer_id)
    return 0 if work is None else work.stake(step, authority.rules)


@pytest.mark.parametrize("seed", range(3))
def test_a_stake_follows_the_log(tmp_path: Path, seed: int) -> None:
    """With refusals, audits, two files of one number and a window that moves."""
    draw = random.Random(seed)

    async def main() -> None:
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

    in_virtual_time(main)


def test_one_verdict_reads_the_verdicts_of_one_step(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = Swarm(tmp_path)
        async with swarm.peer(ALICE) as alice, swarm.peer(BOB):
            tables, read = alice.trusted.tables, []
            whole = tables.judged_at

            def judged_at(worker: str, step: int) -> list[Record]:
                read.append(step)
                return whole(worker, step)

            tables.judged_at = judged_at  # type: ignore[method-assign]
            for step in range(20):
                await alice.trusted.append_verdict(verdict_at(step, step=step, evidence=CHECKED))
            assert alice.trusted.stake(WORKER.peer_id, 20) == 800
            read.clear()
            await alice.trusted.append_verdict(verdict_at(99, step=7, evidence=CHECKED))
            assert alice.trusted.stake(WORKER.peer_id, 20) == 840
            assert read == [7]

    in_virtual_time(main)
