"""Receipts as small JSON files that anyone can check offline: a verdict, proven to be in a log.

A worker keeps the proofs of its own work in its database, where `swarm ledger prove` reads them.
They stay when the validator has sealed and deleted the entries."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from swarm.data import statements
from swarm.errors import DECODE_ERRORS
from swarm.ledger.receipts import Receipt
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.succession import NotAuthorised, ownership_of
from swarm.world import Database, execute


class ProofFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file; all bytes are hexadecimal text."""

    format: Literal["swarm-receipt-1"] = "swarm-receipt-1"
    run: str
    """For readers; the envelopes decide."""
    manifest: str
    """The owner's signed run manifest, which names the validator."""
    verdict: str
    entry: str
    """The log entry: the leaf's bytes."""
    index: int
    head: str
    """The validator's signed head of its log."""
    proof: list[str]
    """The inclusion proof (RFC 6962)."""


NO_MANIFEST = "it has no run manifest that the run's owner signed"


@dataclass(frozen=True)
class Proven:
    """An opened proof file."""

    signed: Envelope
    receipt: Receipt

    def problem(self) -> str | None:
        """Why the file proves nothing, or None. The caller checks who signed the manifest."""
        manifest, run = self.signed.message, self.signed.body.run
        if not isinstance(manifest, RunManifest):
            return NO_MANIFEST
        try:
            ownership_of(self.signed)
        except NotAuthorised:
            return NO_MANIFEST
        if self.receipt.envelope.body.run != run:
            return "verdict and run manifest belong to different runs"
        if not manifest.is_validator(self.receipt.envelope.sender):
            return f"{self.receipt.envelope.sender} is no validator of the run"
        return self.receipt.problem()


def file_of(proven: Proven) -> ProofFile:
    receipt = proven.receipt
    return ProofFile(
        run=proven.signed.body.run,
        manifest=proven.signed.raw.hex(),
        verdict=receipt.envelope.raw.hex(),
        entry=receipt.entry.hex(),
        index=receipt.index,
        head=receipt.head.raw.hex(),
        proof=[each.hex() for each in receipt.proof],
    )


def read(data: bytes) -> Proven:
    """Read a proof file; raises `ValueError` for bytes that are none."""
    try:
        file = msgspec.json.decode(data, type=ProofFile)
        return Proven(
            open_envelope(bytes.fromhex(file.manifest)),
            Receipt(
                open_envelope(bytes.fromhex(file.verdict)),
                bytes.fromhex(file.entry),
                file.index,
                open_envelope(bytes.fromhex(file.head)),
                [bytes.fromhex(each) for each in file.proof],
            ),
        )
    except (Dropped, ValueError, *DECODE_ERRORS) as error:
        raise ValueError(f"it holds no receipt ({error})") from error


KEPT_PROOFS = (
    "SELECT m.envelope, r.verdict, r.entry, r.position, r.head, r.proof "
    "FROM receipts r JOIN proof_manifests m ON m.digest = r.manifest "
    "WHERE r.submission = ? ORDER BY r.number DESC"
)
"""Proofs about a submission, the newest first; `proven_in` reads a row."""

HASH_BYTES = 32


class KeptProofs:
    """The proofs of one run, oldest first, in at most `most_bytes` of the peer's database."""

    def __init__(self, database: Database, run: str, most_bytes: int) -> None:
        self._database = database
        self._run = run
        self._most_bytes = most_bytes

    async def open(self) -> None:
        """Prepare the tables, for a worker that is admitted."""
        await execute(self._database, *statements(__file__))

    def next_index(self, validator: str) -> int:
        """The index in a validator's log after the last entry kept."""
        rows = self._database.read(
            "SELECT max(position) FROM receipts WHERE run = ? AND validator = ?",
            (self._run, validator),
        )
        return 0 if rows[0][0] is None else int(rows[0][0]) + 1

    async def keep(self, proofs: Sequence[Proven]) -> int:
        """Keep proofs durably; return how many older ones were deleted to make room."""

        def run(connection: sqlite3.Connection) -> int:
            for each in proofs:
                receipt, manifest = each.receipt, each.signed
                row = (
                    self._run, receipt.envelope.sender, receipt.index, receipt.verdict.submission,
                    manifest.digest, receipt.envelope.raw, receipt.entry, receipt.head.raw,
                    b"".join(receipt.proof),
                )  # fmt: skip
                size = sum(len(value) for value in row if isinstance(value, bytes | str))
                connection.execute(
                    "INSERT OR REPLACE INTO proof_manifests VALUES (?, ?)",
                    (manifest.digest, manifest.raw),
                )
                connection.execute(
                    "INSERT OR REPLACE INTO receipts (run, validator, position, submission, "
                    "manifest, verdict, entry, head, proof, bytes) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*row, size),
                )
            return self._make_room(connection)

        return await self._database.transact(run)

    def _make_room(self, connection: sqlite3.Connection) -> int:
        rows = connection.execute(
            "SELECT number, bytes FROM receipts WHERE run = ? ORDER BY number DESC", (self._run,)
        )
        total, dropped = 0, []
        for number, size in rows:
            total += size
            if total > self._most_bytes:
                dropped.append((number,))
        connection.executemany("DELETE FROM receipts WHERE number = ?", dropped)
        connection.execute(
            "DELETE FROM proof_manifests WHERE digest NOT IN (SELECT manifest FROM receipts)"
        )
        return len(dropped)


def proven_in(row: Sequence[Any]) -> Proven:
    """The proof in a row of `KEPT_PROOFS`; raises `Dropped` for damaged envelopes."""
    manifest, verdict, entry, index, head, raw = row
    proof = [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]
    receipt = Receipt(open_envelope(verdict), entry, index, open_envelope(head), proof)
    return Proven(open_envelope(manifest), receipt)
