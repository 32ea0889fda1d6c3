"""The submissions that this worker has made, kept across restarts of the peer: rows in its
database, files in its folder `FOLDER`. No number is ever generated twice with other bytes."""

from dataclasses import dataclass

import msgspec

from swarm.data import statements
from swarm.node.node import Node
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.messages import Submission
from swarm.world import execute

FOLDER = "outbox"
"""Folder of submissions that have no verdict yet."""


@dataclass(frozen=True)
class Made:
    """A submission that was made, with all that its delivery needs."""

    submission: Submission
    nonce: bytes
    path: str
    ordered: Envelope | None
    """The step order it follows, presented because the validator may not know the step yet."""
    policies: list[int]
    """Policies that its tokens were sampled from."""


def path_of(lineage: int, step: int, number: int) -> str:
    """Path of a submission's file on the peer's disk."""
    return f"{FOLDER}/{lineage}-{step}-{number}.parquet"


class Outbox:
    """The submissions of one run that this worker has made."""

    def __init__(self, node: Node, run: str) -> None:
        self._node = node
        self._run = run

    async def open(self) -> None:
        await execute(self._node.database, *statements(__file__))

    async def sweep(self) -> None:
        """Remove files that no row names: they were not finished, or are not wanted any more."""
        disk = self._node.disk
        kept = {each.path for each in self.waiting()}
        for name in disk.list(FOLDER):
            path = f"{FOLDER}/{name}"
            if path not in kept:
                await disk.remove(path)

    async def keep(self, made: Made) -> None:
        """Remember a submission, before it is delivered."""
        each = made.submission
        row = (
            *self._key(each),
            each.entry,
            msgspec.msgpack.encode(each),
            made.nonce,
            made.ordered.raw if made.ordered is not None else None,
            msgspec.msgpack.encode(made.policies),
        )
        await self._change(
            "INSERT OR REPLACE INTO made (run, lineage, step, number, entry, submission, nonce, "
            "ordered, policies) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )

    async def settle(self, submission: Submission, receipt: Envelope | None) -> None:
        """Remember that a submission needs no further delivery, and the receipt on it."""
        await self._change(
            "UPDATE made SET judged = 1, receipt = ? "
            "WHERE run = ? AND lineage = ? AND step = ? AND number = ?",
            (receipt.raw if receipt is not None else None, *self._key(submission)),
        )

    async def forget_before(self, lineage: int, step: int) -> None:
        """Forget the submissions of other lineages and of earlier steps."""
        await self._change(
            "DELETE FROM made WHERE run = ? AND (lineage != ? OR step < ?)",
            (self._run, lineage, step),
        )

    async def forget_undelivered(self, entry: bytes) -> None:
        """Forget what has no verdict and was drawn with another entry: it would be refused."""
        await self._change(
            "DELETE FROM made WHERE run = ? AND judged = 0 AND entry != ?", (self._run, entry)
        )

    def next_number(self, lineage: int, step: int) -> int:
        """The first number of a step that this worker has not made."""
        rows = self._node.database.read(
            "SELECT max(number) FROM made WHERE run = ? AND lineage = ? AND step = ?",
            (self._run, lineage, step),
        )
        return 0 if rows[0][0] is None else int(rows[0][0]) + 1

    def waiting(self) -> list[Made]:
        """The submissions without a verdict whose files are complete, by step and number."""
        rows = self._node.database.read(
            "SELECT lineage, step, number, submission, nonce, ordered, policies FROM made "
            "WHERE run = ? AND judged = 0 ORDER BY lineage, step, number",
            (self._run,),
        )
        found = []
        for lineage, step, number, raw, nonce, ordered, named in rows:
            path = path_of(lineage, step, number)
            submission = msgspec.msgpack.decode(raw, type=Submission)
            disk = self._node.disk
            if disk.exists(path) and disk.size_bytes(path) == submission.size_bytes:
                policies = msgspec.msgpack.decode(named, type=list[int]) if named else []
                found.append(Made(submission, nonce, path, _opened(ordered), policies))
        return found

    def receipts(self) -> list[Envelope]:
        """The receipts of settled submissions; a validator asks for the one before a number."""
        rows = self._node.database.read(
            "SELECT receipt FROM made WHERE run = ? AND receipt IS NOT NULL "
            "ORDER BY lineage, step, number",
            (self._run,),
        )
        opened = [_opened(raw) for (raw,) in rows]
        return [each for each in opened if each is not None]

    def _key(self, submission: Submission) -> tuple[str, int, int, int]:
        return self._run, submission.lineage, submission.step, submission.number

    async def _change(self, sql: str, parameters: tuple[object, ...] = ()) -> None:
        await execute(self._node.database, (sql, parameters))


def _opened(raw: bytes | None) -> Envelope | None:
    """A stored envelope; None if there is none, or another version of Swarm wrote it."""
    if raw is None:
        return None
    try:
        return open_envelope(raw)
    except Dropped:
        return None
