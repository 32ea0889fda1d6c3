"""The trusted peers' logs of a run, and checks that the trainer's own state agrees with them."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.ledger.entries import CheckpointPublished, Consumed, Evicted, Judged, decode
from swarm.ledger.record import Rules
from swarm.ledger.state import Authority, LedgerState, Record, ledger_state
from tests.end_to_end.harness import Swarm

IN_FLIGHT_SECONDS = 3.0
"""Largest age of a verdict, at the publication of the last policy, that may not have reached the
pool."""


@dataclass(frozen=True)
class Accounts:
    records: list[Record]
    state: LedgerState
    accepted: dict[bytes, int]
    """Number of groups of each submission that a validator accepted."""
    trained: set[bytes]
    """Submissions that the log records as consumed or zero-advantage."""
    stale: set[bytes]
    pool: set[bytes]
    """Accepted submissions that the trainer holds and has not used."""

    def evicted(self) -> set[str]:
        """Peers that a log records as evicted."""
        return {each.entry.peer for each in self.records if isinstance(each.entry, Evicted)}


def read_accounts(swarm: Swarm) -> Accounts:
    """Read the trusted peers' own logs from their disks and merge them."""
    trainer = swarm["trainer"]
    trusted = [trainer, *swarm.of_role("validator")]
    records = [
        Record(peer.identity.peer_id, position, decode(raw))
        for peer in trusted
        for position, raw in _rows(
            peer.home / "ledger.sqlite",
            "SELECT position, entry FROM entries WHERE owner = ? ORDER BY position",
            peer.identity.peer_id,
        )
    ]
    authority = Authority(
        owners="",
        validators=swarm.validators,
        trusted=[peer.identity.peer_id for peer in trusted],
        rules=Rules(stake_steps=100, hold_steps=110, safety=3.0, observes=False),
        run="",
    )
    state = ledger_state(records, authority)
    trained: set[bytes] = set()
    stale: set[bytes] = set()
    for submission, outcomes in state.consumed.items():
        if set(outcomes) != {"carried"}:  # carried groups were still in the pool at the run's end
            (stale if set(outcomes) == {"stale"} else trained).add(submission)
    pool = _rows(trainer.home / "trainer.sqlite", "SELECT digest FROM accepted ORDER BY digest")
    return Accounts(
        records=records,
        state=state,
        accepted={
            record.entry.submission: record.entry.groups
            for record in records
            if isinstance(record.entry, Judged) and record.entry.outcome == "accepted"
        },
        trained=trained,
        stale=stale,
        pool={row[0] for row in pool} - trained - stale,
    )


def _rows(database: Path, sql: str, *parameters: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute(sql, parameters).fetchall()
    finally:
        connection.close()


def check_accounts(swarm: Swarm, unreadable: Collection[str] = ()) -> Accounts:
    """Check that nothing is lost or trained on twice, and that each policy has one manifest.

    `unreadable`: digests of submissions that an older trainer, by a defect of its own, could not
    read.
    """
    accounts = read_accounts(swarm)
    own = [
        record.entry
        for record in accounts.records
        if record.owner == swarm["trainer"].identity.peer_id
    ]
    consumed = [entry for entry in own if isinstance(entry, Consumed)]

    # Each submission once, only accepted ones, with an outcome for each group.
    times = Counter(entry.submission for entry in consumed)
    twice = [
        (entry.submission.hex()[:8], entry.step, entry.outcomes)
        for entry in consumed
        if times[entry.submission] > 1
    ]
    assert not twice, f"in the trainer's log twice: {sorted(twice)}"
    assert times.keys() <= accounts.accepted.keys(), "a submission was used that nobody accepted"
    for submission, outcomes in accounts.state.consumed.items():
        assert len(outcomes) == accounts.accepted[submission]
        if submission not in accounts.stale:  # another validator may refuse stale ones later
            assert len(outcomes) == accounts.state.verdicts[submission].groups
        why = swarm["trainer"].heard("trainer.unreadable")
        if submission.hex() not in unreadable:
            fine = {"consumed", "zero-advantage", "stale", "carried"}
            assert set(outcomes) <= fine, (outcomes, why)

    # Nothing is lost except verdicts that came when no more groups were wanted. A peer that still
    # runs writes a verdict to its log before this process reads the event of it.
    missing = accounts.accepted.keys() - accounts.trained - accounts.stale - accounts.pool
    early = _judged_in_time(swarm)
    lost = {_place(accounts.state.verdicts[submission]) for submission in missing} & early
    assert not lost, f"accepted, and neither used nor held: {sorted(lost)}"

    # The learner's record agrees with the log, for the steps that it still remembers.
    by_step: dict[int, set[bytes]] = defaultdict(set)
    for entry in consumed:
        if not set(entry.outcomes) <= {"stale", "carried"}:
            by_step[entry.step].add(entry.submission)
    steps = swarm.manifest.schedule.steps
    assert sorted(by_step) == list(range(steps)), {
        step: [e.outcomes for e in consumed if e.step == step]
        for step in set(range(steps)) ^ set(by_step)
    }
    state = json.loads((swarm["trainer"].home / f"trainer/states/0-{steps}/state.json").read_text())
    assert state["step"] == steps
    for step, names in state["consumed"].items():
        assert len(set(names)) == len(names)
        assert {bytes.fromhex(name) for name in names} == by_step[int(step)]

    # Each policy has one manifest, and each manifest is in the log.
    published = Counter(
        (entry.lineage, entry.step) for entry in own if isinstance(entry, CheckpointPublished)
    )
    assert published == {(0, step): 1 for step in range(steps + 1)}
    for peer in swarm.peers.values():
        assert not [e for e in peer.heard("shardcast.checkpoint_failed") if "another" in str(e)]
    return accounts


def check_nobody_was_wronged(accounts: Accounts) -> None:
    """Check that in a run of honest peers every verdict accepts and nobody is evicted.

    Deaths of peers make no difference, except that late work is rightly refused as late.
    """
    wrong = [
        record.entry
        for record in accounts.records
        if isinstance(record.entry, Judged)
        and record.entry.outcome != "accepted"
        and record.entry.failed not in ("stale", "step")
    ]
    assert not wrong, [(e.outcome, e.failed, e.step, e.number, e.worker) for e in wrong]
    assert not accounts.evicted()


def _place(verdict: Judged) -> tuple[str, int, int]:
    return (verdict.worker, verdict.step, verdict.number)


def _judged_in_time(swarm: Swarm) -> set[tuple[str, int, int]]:
    """List (worker, step, number) of the verdicts that came well before the last policy was
    published."""
    steps = swarm.manifest.schedule.steps
    end = swarm["trainer"].heard("trainer.checkpoint_published", step=steps)[0]["time"]
    return {
        (event["worker"], event["step"], event["number"])
        for validator in swarm.of_role("validator")
        for event in validator.heard("validator.verdict")
        if event["time"] < end - IN_FLIGHT_SECONDS
    }
