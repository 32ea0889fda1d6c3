"""Durable state of a trainer's network process, in SQLite: `trainer.sqlite`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from peers.trainer.pool import SubmissionKey
from swarm.data import statements
from swarm.errors import DECODE_ERRORS, UserError
from swarm.jobs.training import StateValue
from swarm.ledger.entries import Consumed
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.messages import StepOrder, Verdict
from swarm.world import Database, execute

T = TypeVar("T")

_TABLES = statements(__file__)

ORDERS_KEPT = 512
"""Step orders kept from before the oldest batch."""


class Batch(NamedTuple):
    """The submissions that one step has trained on."""

    consumed: list[Consumed]
    """Their log entries, in the order of the batch."""
    reward: float
    """Their mean reward."""
    values: Sequence[list[StateValue]] = ()
    """[submissions] Values of states that the step has used, or nothing."""


class TrainerStore:
    """Accepted submissions, their keys, step orders and batches: durable on return."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> None:
        """Create the tables that are missing."""
        await execute(self._database, *_TABLES)

    # --- accepted submissions ----------------------------------------------------------------

    async def keep_accepted(self, verdict: Verdict, envelope: Envelope) -> None:
        """Write an accepted submission and its signed verdict; take its key if that is free."""
        await execute(
            self._database,
            (
                "INSERT OR REPLACE INTO accepted (digest, verdict) VALUES (?, ?)",
                (verdict.submission, envelope.raw),
            ),
            (
                "INSERT OR IGNORE INTO numbers (lineage, policy, step, number, worker, digest) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*SubmissionKey.of(verdict), verdict.submission),
            ),
        )

    def accepted(self) -> Iterator[tuple[bytes, Verdict | None]]:
        """Digest and verdict of each submission, by digest; the verdict is None if unreadable."""
        for digest, raw in self._database.read(
            "SELECT digest, verdict FROM accepted ORDER BY digest"
        ):
            try:
                verdict = open_envelope(raw).message
            except Dropped:  # another version of Swarm wrote it
                verdict = None
            yield digest, verdict if isinstance(verdict, Verdict) else None

    async def keep_consumed(self, digests: Sequence[bytes]) -> None:
        """Move submissions to those that stay after they were consumed."""
        keep = "INSERT OR REPLACE INTO kept SELECT digest, verdict FROM accepted WHERE digest = ?"
        delete = "DELETE FROM accepted WHERE digest = ?"
        each = [(sql, (digest,)) for digest in digests for sql in (keep, delete)]
        await execute(self._database, *each)

    async def drop_accepted(self, digests: Sequence[bytes]) -> None:
        """Delete submissions; their keys stay taken."""
        sql = "DELETE FROM accepted WHERE digest = ?"
        await execute(self._database, *((sql, (digest,)) for digest in digests))

    def taken_keys(self) -> dict[SubmissionKey, bytes]:
        """Digest of the file taken under each key."""
        return {
            SubmissionKey(*key): digest
            for *key, digest in self._database.read(
                "SELECT lineage, policy, step, number, worker, digest FROM numbers "
                "ORDER BY lineage, policy, step, number, worker"
            )
        }

    async def drop_keys_before(self, lineage: int, policy: int) -> None:
        """Free the keys of policies older than this one."""
        sql = "DELETE FROM numbers WHERE (lineage, policy) < (?, ?)"
        await execute(self._database, (sql, (lineage, policy)))

    # --- step orders -------------------------------------------------------------------------

    async def keep_order(self, order: StepOrder) -> None:
        """Write the newest revision of a step's order."""
        sql = "INSERT OR REPLACE INTO orders (lineage, step, revision, message) VALUES (?, ?, ?, ?)"
        row = (order.lineage, order.step, order.revision, msgspec.msgpack.encode(order))
        await execute(self._database, (sql, row))

    def order(self, lineage: int, step: int) -> StepOrder | None:
        """The newest order of a step."""
        rows = self._database.read(
            "SELECT message FROM orders WHERE lineage = ? AND step = ? "
            "ORDER BY revision DESC LIMIT 1",
            (lineage, step),
        )
        return _decode(rows[0][0], StepOrder) if rows else None

    def newest_orders(self, lineage: int, count: int) -> list[StepOrder]:
        """Orders of the newest `count` steps of a lineage, newest first."""
        rows = self._database.read(
            "SELECT message FROM orders WHERE lineage = ? ORDER BY step DESC LIMIT ?",
            (lineage, count),
        )
        return [_decode(raw, StepOrder) for (raw,) in rows]

    # --- batches -----------------------------------------------------------------------------

    async def keep_batch(self, lineage: int, step: int, batch: Batch) -> None:
        """Write a step's batch, before its state and policy: an older state's resume repeats it."""
        consumed, values = map(msgspec.msgpack.encode, (batch.consumed, batch.values))
        await execute(
            self._database,
            (
                "INSERT OR REPLACE INTO batches (lineage, step, reward, consumed) "
                "VALUES (?, ?, ?, ?)",
                (lineage, step, batch.reward, consumed),
            ),
            (
                "INSERT OR REPLACE INTO state_values (lineage, step, given) VALUES (?, ?, ?)",
                (lineage, step, values),
            ),
        )

    def batches_from(self, lineage: int, step: int) -> dict[int, Batch]:
        """The batches of this and all later steps of a lineage, by step, in order."""
        rows = self._database.read(
            "SELECT step, reward, consumed FROM batches WHERE lineage = ? AND step >= ? "
            "ORDER BY step",
            (lineage, step),
        )
        values = dict(
            self._database.read(
                "SELECT step, given FROM state_values WHERE lineage = ? AND step >= ?",
                (lineage, step),
            )
        )
        return {
            step: Batch(
                _decode(raw, list[Consumed]),
                reward,
                _decode(values[step], list[list[StateValue]]) if step in values else [],
            )
            for step, reward, raw in rows
        }

    async def drop_batches_before(self, lineage: int, step: int) -> None:
        """Delete the batches of older steps, which a durable state includes."""
        await execute(
            self._database,
            ("DELETE FROM batches WHERE (lineage, step) < (?, ?)", (lineage, step)),
            ("DELETE FROM orders WHERE (lineage, step) < (?, ?)", (lineage, step - ORDERS_KEPT)),
            ("DELETE FROM state_values WHERE (lineage, step) < (?, ?)", (lineage, step)),
        )


def _decode(raw: bytes, kind: type[T]) -> T:
    """Decode a row, or raise `UserError`: without it the trainer could sign a step twice."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except DECODE_ERRORS as error:
        raise UserError(
            f"trainer.sqlite in this home was written by another version of Swarm ({error}); "
            "continue the run with that version"
        ) from error
