"""How far a run has come, what is too old, and what a restarted trainer still knows."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peers.trainer.pool import SubmissionKey
from peers.trainer.progress import STEPS_REMEMBERED, Progress
from peers.trainer.store import Batch, TrainerStore
from swarm.errors import UserError
from swarm.jobs.training import StateValue
from swarm.ledger.entries import Consumed
from swarm.run.manifest import content_digest
from swarm.run.run import Run
from swarm.wire.envelope import Envelope
from swarm.wire.messages import StepOrder, Verdict
from swarm.world.disk import LocalDisk
from tests.network.harness import identity, manifest, sealed, sealed_manifest
from tests.orders import step_order
from tests.orders import verdict as accepted

pytestmark = pytest.mark.wall_clock

OWNER, TRAINER, VALIDATOR = (identity(number) for number in range(1, 4))

VALUES = [[StateValue(row=3, position=2, value=0.5)], []]
"""Values of states that a step has used."""


def version(number: int, **schedule: Any) -> Envelope:
    """A version of a run of 10 steps with max_staleness 4, unless `schedule` differs."""
    message = manifest([TRAINER], [VALIDATOR], version=number)
    fields = {"max_staleness": 4, **schedule}
    return sealed_manifest(
        OWNER,
        msgspec.structs.replace(
            message, schedule=msgspec.structs.replace(message.schedule, **fields)
        ),
    )


def verdict(*, policy: int = 0, lineage: int = 0, number: int = 0) -> Verdict:
    digest = bytes([policy, number]) * 16
    return accepted(number, submission=digest, lineage=lineage, step=policy, policy=policy)


def order(step: int, *, revision: int = 0, run: Envelope) -> StepOrder:
    return step_order(step, revision=revision, run_digest=content_digest(run))


# --- progress --------------------------------------------------------------------------------


def test_what_was_too_old_once_stays_so_until_a_rollback() -> None:
    run = Run(version(1))
    progress = Progress(run)
    progress.advance(6)
    assert [progress.too_old(verdict(policy=policy)) for policy in (1, 2, 6)] == [
        True,
        False,
        False,
    ]
    assert progress.too_old(verdict(policy=6, lineage=1))
    assert run.update(version(2, max_staleness=9))
    assert progress.too_old(verdict(policy=1)), "it was dropped already"
    progress.begin_lineage(1, 3)
    assert not progress.too_old(verdict(policy=1, lineage=1))


def test_a_run_is_over_when_its_newest_version_says_so() -> None:
    run = Run(version(1))
    progress = Progress(run)
    progress.advance(9)
    assert not progress.over
    progress.advance(10)
    assert progress.over
    assert run.update(version(2, steps=20))
    assert not progress.over


def test_a_step_follows_the_version_that_was_the_newest_when_it_was_opened() -> None:
    run = Run(version(1))
    followed = Progress(run).versions
    followed.follow(0)
    assert run.update(version(2))
    assert [followed.manifest_of(step).version for step in (0, 1)] == [1, 2]
    restored = Progress(run).versions
    restored.restore([order(3, run=version(1)), order(4, run=version(9))])
    assert [restored.manifest_of(step).version for step in (3, 4)] == [1, 2]


def test_steps_long_past_are_forgotten() -> None:
    run = Run(version(1))
    followed = Progress(run).versions
    for step in range(STEPS_REMEMBERED + 1):
        followed.follow(step)
    assert run.update(version(2))
    assert [followed.manifest_of(step).version for step in (0, 1)] == [2, 1]


# --- what is durable -------------------------------------------------------------------------


async def test_a_restarted_trainer_reads_what_it_kept(tmp_path: Path) -> None:
    verdicts = [verdict(policy=policy, number=number) for policy in (0, 1) for number in (0, 1)]
    entry = Consumed(step=1, submission=bytes(32), outcomes=["consumed"])
    store = TrainerStore(LocalDisk(tmp_path).database("trainer.sqlite"))
    await store.open()
    for each in verdicts:
        await store.keep_accepted(each, sealed(VALIDATOR, each, "run"))
    await store.drop_accepted([verdicts[0].submission])
    await store.drop_keys_before(0, 1)
    for step, revision in ((0, 0), (1, 0), (1, 1)):
        await store.keep_order(order(step, revision=revision, run=version(1)))
    for lineage, step in ((0, 1), (0, 2), (1, 2), (1, 3)):
        await store.keep_batch(lineage, step, Batch([entry], 0.25 * step, values=VALUES))
    await store.drop_batches_before(0, 2)

    store = TrainerStore(LocalDisk(tmp_path).database("trainer.sqlite"))
    await store.open()
    assert dict(store.accepted()) == {each.submission: each for each in verdicts[1:]}
    keys = {SubmissionKey.of(each): each.submission for each in verdicts if each.policy == 1}
    assert store.taken_keys() == keys
    assert [(o.step, o.revision) for o in store.newest_orders(0, 9)] == [(1, 1), (0, 0)]
    assert store.newest_orders(1, 9) == []
    assert store.batches_from(0, 0) == {2: Batch([entry], 0.5, values=VALUES)}
    assert store.batches_from(1, 3) == {3: Batch([entry], 0.75, values=VALUES)}
    assert store.batches_from(0, 3) == {}


async def test_rows_of_another_version_are_left_out_or_end_the_trainer_with_a_sentence(
    tmp_path: Path,
) -> None:
    """An order that is forgotten would be signed again, with another nonce."""
    database = LocalDisk(tmp_path).database("trainer.sqlite")
    store = TrainerStore(database)
    await store.open()
    await store.keep_accepted(verdict(), sealed(VALIDATOR, verdict(), "run"))
    await store.keep_order(order(0, run=version(1)))
    await store.keep_batch(0, 2, Batch([], 0.25))

    def spoil(connection: sqlite3.Connection) -> None:
        for change in ("accepted SET verdict", "orders SET message", "batches SET consumed"):
            connection.execute(f"UPDATE {change} = x'c0'")

    await database.transact(spoil)
    assert list(store.accepted()) == [(verdict().submission, None)]
    for read in (lambda: store.newest_orders(0, 9), lambda: store.batches_from(0, 2)):
        with pytest.raises(UserError, match="written by another version of Swarm"):
            read()
