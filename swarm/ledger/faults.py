"""Evidence of proven faults: whatever anyone needs in order to recompute one.

The validator that evicts a worker for a proven fault keeps the file and the three signed messages
that determine what the file should hold. It serves them to everyone (`swarm ledger check-eviction`
runs the same checks again). The worker signed the file's digest, so nobody can replace it."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from swarm.data import statements
from swarm.errors import DECODE_ERRORS
from swarm.wire.envelope import ENVELOPE_BYTES_MAX, Dropped, Envelope, open_envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import StepOrder, Submission
from swarm.wire.succession import NotAuthorised, ownership_of
from swarm.world import Database, Disk, execute

FAULTS_MAX = 64
"""Faults whose evidence one validator keeps; the oldest is dropped. A worker is evicted once, so
this is one file (at most `limits.submission_bytes_max`) for each of the last evicted workers."""

FOLDER = "faults"

_Raw = Annotated[bytes, Meta(max_length=ENVELOPE_BYTES_MAX)]


class FaultRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The signed messages that, with the file, prove a fault."""

    announcement: _Raw
    """The worker's `Submission`, which names the file's digest."""
    order: _Raw
    """The trainer's `StepOrder` that the worker followed; it has nonce and policy."""
    manifest: _Raw
    """The owner's `RunManifest` that the order names; it has environments, sampling and limits."""

    @property
    def opened(self) -> "Fault":
        """The messages, with checked signatures; raises `ValueError` if they do not fit together.

        The caller checks that the manifest is the owner's and trusts the signer of the order."""
        try:
            announcement, order, manifest = map(
                open_envelope, (self.announcement, self.order, self.manifest)
            )
        except Dropped as dropped:
            raise ValueError(f"the evidence holds an invalid message ({dropped})") from dropped
        fault = Fault(announcement, order, manifest)
        problem = fault.problem()
        if problem is not None:
            raise ValueError(problem)
        return fault


@dataclass(frozen=True)
class Fault:
    """The opened messages of a `FaultRecord`."""

    announced: Envelope
    ordered: Envelope
    signed: Envelope

    @property
    def record(self) -> FaultRecord:
        """The messages as they are kept and sent."""
        return FaultRecord(
            announcement=self.announced.raw, order=self.ordered.raw, manifest=self.signed.raw
        )

    @property
    def worker(self) -> str:
        return self.announced.sender

    @property
    def submission(self) -> Submission:
        return self.announced.expect(Submission)

    @property
    def order(self) -> StepOrder:
        return self.ordered.expect(StepOrder)

    @property
    def manifest(self) -> RunManifest:
        return self.signed.expect(RunManifest)

    def problem(self) -> str | None:
        """Why the messages do not belong together, or None."""
        kinds = ("submission", "step_order", "run_manifest")
        found = (self.announced, self.ordered, self.signed)
        if tuple(each.body.kind for each in found) != kinds:
            return "the evidence is not an announcement, a step order and a run manifest"
        if len({each.body.run for each in found}) != 1:
            return "the messages of the evidence belong to different runs"
        try:
            ownership_of(self.signed)
        except NotAuthorised:
            return "the run manifest of the evidence is not signed by the run's owner"
        if self.order.run_digest != blake3(self.signed.body.payload).digest():
            return "the step order of the evidence names another run manifest"
        if self.ordered.sender not in [key.peer for key in self.manifest.trainers]:
            return "the step order of the evidence is not signed by a trainer of the run"
        named, ordered = self.submission, self.order
        if (named.lineage, named.step, named.policy) != (
            ordered.lineage,
            ordered.step,
            ordered.policy,
        ):
            return "the announcement and the step order of the evidence name different steps"
        return None


class FaultStore:
    """The evidence that this peer keeps, in a table of its ledger and a folder of files."""

    def __init__(self, database: Database, disk: Disk) -> None:
        self._database = database
        self._disk = disk
        self.lender: Callable[[bytes, str], Fault | None] = lambda _submission, _worker: None
        """The messages of a judged submission whose file is still here, by file and worker. They
        are served too, so that other validators can judge it."""

    async def create(self) -> None:
        """Create the table if it does not exist, and remove files that it does not list."""
        await execute(self._database, *statements(__file__))
        listed = {f"{FOLDER}/{name}" for name in self._disk.list(FOLDER)}
        kept = {path_of(digest) for (digest,) in self._database.read(_ALL)}
        for path in sorted(listed - kept):
            await self._disk.remove(path)

    async def keep(self, fault: Fault, path: str) -> None:
        """Keep the evidence of a fault durably; moves the file at `path` here."""
        submission = fault.submission.digest
        await self._disk.rename(path, path_of(submission))
        await self._disk.sync(path_of(submission))

        def insert(connection: sqlite3.Connection) -> list[bytes]:
            connection.execute(
                "INSERT OR IGNORE INTO proven_faults (submission, worker, record) VALUES (?, ?, ?)",
                (submission, fault.worker, _encoder.encode(fault.record)),
            )
            before = {digest for (digest,) in connection.execute(_ALL)}
            connection.execute(
                "DELETE FROM proven_faults WHERE position NOT IN "
                "(SELECT position FROM proven_faults ORDER BY position DESC LIMIT ?)",
                (FAULTS_MAX,),
            )
            return sorted(before - {digest for (digest,) in connection.execute(_ALL)})

        for digest in await self._database.transact(insert):
            await self._disk.remove(path_of(digest))

    def record(self, submission: bytes, worker: str) -> tuple[bytes, int]:
        """The encoded `FaultRecord` of a worker's submission, and its file's size.

        Empty and 0 if unknown. Several workers may hand in the same file."""
        rows = self._database.read(
            "SELECT record FROM proven_faults WHERE submission = ? AND worker = ? ORDER BY 1",
            (submission, worker),
        )
        if not rows or not self._disk.exists(path_of(submission)):
            lent = self.lender(submission, worker)
            return (_encoder.encode(lent.record), 0) if lent is not None else (b"", 0)
        return bytes(rows[0][0]), self._disk.size_bytes(path_of(submission))

    async def read(self, submission: bytes, start: int, count: int) -> bytes:
        """Up to `count` bytes of the file; raises `ValueError` if this peer does not keep it."""
        kept = self._database.read(
            "SELECT 1 FROM proven_faults WHERE submission = ? ORDER BY 1", (submission,)
        )
        path = path_of(submission)
        size = self._disk.size_bytes(path) if kept and self._disk.exists(path) else 0
        if start >= size:
            raise ValueError("no such evidence is kept here")
        return await self._disk.read(path_of(submission), start, min(count, size - start))


_ALL = "SELECT DISTINCT submission FROM proven_faults ORDER BY submission"

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FaultRecord] = msgspec.msgpack.Decoder(FaultRecord)


def path_of(submission: bytes) -> str:
    """Where the file of a kept fault is."""
    return f"{FOLDER}/{submission.hex()}.parquet"


def decode_record(raw: bytes) -> FaultRecord:
    """Decode a `FaultRecord`; raises `ValueError`."""
    try:
        return _decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise ValueError(f"malformed evidence: {error}") from error
