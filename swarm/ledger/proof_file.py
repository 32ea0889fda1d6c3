"""Receipts as small JSON files that anyone can check offline: a verdict, proven to be in a log.

A worker keeps the proofs of its own work in its database; `swarm ledger prove` reads them.

A trusted peer deletes entries of its log one epoch after they are sealed; these proofs stay.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from swarm.errors import DECODE_ERRORS
from swarm.ledger import merkle
from swarm.ledger.archive import Archive, LogCopy
from swarm.ledger.epochs import records_of, seals_in
from swarm.ledger.receipts import Receipt
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import LogHead
from swarm.wire.succession import NotAuthorised, ownership_of
from swarm.world import Database


class ProofFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file; all bytes are hexadecimal text."""

    format: Literal["swarm-receipt-1"] = "swarm-receipt-1"
    run: str
    """For readers; the envelopes decide."""
    manifest: str
    """The owner's signed run manifest, which names the validator."""
    verdict: str
    """The signed verdict."""
    entry: str
    """The log entry: the leaf's bytes."""
    index: int
    head: str
    """The validator's signed head of its log."""
    proof: list[str]
    """The inclusion proof (RFC 6962)."""
    sealed_size: int = 0
    """The size that the newest seal covers of the log, if it covers the entry; else 0."""
    sealed_proof: list[str] = []
    """The inclusion proof under that size, whose root later seals repeat."""


NO_MANIFEST = "it has no run manifest that the run's owner signed"


@dataclass(frozen=True)
class Proven:
    """An opened proof file."""

    signed: Envelope
    """The run manifest."""
    receipt: Receipt
    sealed_size: int = 0
    sealed: Sequence[bytes] = ()
    """The inclusion proof under the first `sealed_size` entries, of which a seal has the root."""

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


def receipt_in(log: LogCopy, index: int) -> Receipt:
    """The receipt for an entry, under the newest head that covers it; raises `ValueError`."""
    envelope = log.verdicts.get(index)
    if envelope is None:
        raise ValueError(f"only {log.owner} keeps the signed verdict of entry {index}")
    start, node = log.origin.start, _nodes(log, index)
    for head in sorted(log.heads.values(), key=lambda head: -head.body.sequence):
        signed = head.expect(LogHead)
        if index < signed.size <= log.size and merkle.root(signed.size, node) == signed.root:
            proof = merkle.inclusion_proof(index, signed.size, node)
            return Receipt(envelope, log.entries[index - start], index, head, proof)
    raise ValueError(f"no signed head of {log.owner} covers entry {index}")


def _nodes(log: LogCopy, index: int) -> Callable[[int, int], bytes]:
    """The hashes of the tree of a log that has entry `index`; raises `ValueError`."""
    start = log.origin.start
    if index < start:
        raise ValueError(f"entry {index} of {log.owner} is sealed and pruned")
    nodes = dict(zip(merkle.peaks_of(start), log.origin.peaks, strict=True))

    def node(level: int, position: int) -> bytes:
        return nodes[(level, position)]

    for size, raw in enumerate(log.entries, start):
        for level, position, value in merkle.completed_by(size, merkle.leaf_hash(raw), node):
            nodes[(level, position)] = value
    return node


def _under_a_seal(log: LogCopy, index: int) -> tuple[int, list[bytes]]:
    """Size and inclusion proof under the newest seal that covers an entry; (0, []) without."""
    for _, seal in reversed(seals_in(records_of(log.owner, log.origin.start, log.entries))):
        covered = seal.log(log.owner)
        if covered is not None and index < covered.size <= log.size:
            node = _nodes(log, index)
            return covered.size, merkle.inclusion_proof(index, covered.size, node)
    return 0, []


def written(archive: Archive, receipt: Receipt) -> ProofFile:
    """The file that proves a receipt."""
    sealed_size, sealed = _under_a_seal(archive.log(receipt.envelope.sender), receipt.index)
    return file_of(Proven(archive.signed, receipt, sealed_size, sealed))


def file_of(proven: Proven) -> ProofFile:
    """The file that `read` reads."""
    receipt = proven.receipt
    return ProofFile(
        run=proven.signed.body.run,
        manifest=proven.signed.raw.hex(),
        verdict=receipt.envelope.raw.hex(),
        entry=receipt.entry.hex(),
        index=receipt.index,
        head=receipt.head.raw.hex(),
        proof=[each.hex() for each in receipt.proof],
        sealed_size=proven.sealed_size,
        sealed_proof=[each.hex() for each in proven.sealed],
    )


def read(data: bytes) -> Proven:
    """Read a proof file; raises `ValueError` for bytes that are none."""
    try:
        file = msgspec.json.decode(data, type=ProofFile)
        proof: Sequence[bytes] = [bytes.fromhex(each) for each in file.proof]
        return Proven(
            open_envelope(bytes.fromhex(file.manifest)),
            Receipt(
                open_envelope(bytes.fromhex(file.verdict)),
                bytes.fromhex(file.entry),
                file.index,
                open_envelope(bytes.fromhex(file.head)),
                list(proof),
            ),
            file.sealed_size,
            [bytes.fromhex(each) for each in file.sealed_proof],
        )
    except (Dropped, ValueError, *DECODE_ERRORS) as error:
        raise ValueError(f"it holds no receipt ({error})") from error


_COLUMNS = (
    "SELECT proof_manifests.envelope, proofs.verdict, proofs.entry, proofs.position, "
    "proofs.head, proofs.proof, proofs.sealed_size, proofs.sealed_proof "
    "FROM proofs JOIN proof_manifests ON proof_manifests.digest = proofs.manifest "
)
KEPT_PROOFS = f"{_COLUMNS}WHERE proofs.submission = ? ORDER BY proofs.number DESC"
"""Proofs about a submission, the newest first; `proven_in` reads a row."""
KEPT_PROOFS_OF_RUN = f"{_COLUMNS}WHERE proofs.run = ? ORDER BY proofs.validator, proofs.position"

HASH_BYTES = 32


class KeptProofs:
    """The proofs of one run, oldest first, in at most `most_bytes` of the peer's database."""

    def __init__(self, database: Database, run: str, most_bytes: int) -> None:
        self._database = database
        self._run = run
        self._most_bytes = most_bytes

    async def open(self) -> None:
        """Prepare the tables, for a worker that is admitted."""

        def create(connection: sqlite3.Connection) -> None:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS proof_manifests "
                "(digest BLOB PRIMARY KEY, envelope BLOB NOT NULL) WITHOUT ROWID"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS proofs (number INTEGER PRIMARY KEY AUTOINCREMENT, "
                "run TEXT NOT NULL, validator TEXT NOT NULL, position INTEGER NOT NULL, "
                "submission BLOB NOT NULL, manifest BLOB NOT NULL, verdict BLOB NOT NULL, "
                "entry BLOB NOT NULL, head BLOB NOT NULL, proof BLOB NOT NULL, "
                "sealed_size INTEGER NOT NULL, sealed_proof BLOB NOT NULL, bytes INTEGER NOT NULL, "
                "UNIQUE (run, validator, position))"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS own_expulsions "
                "(run TEXT NOT NULL, manifest BLOB NOT NULL, envelope BLOB NOT NULL)"
            )
            # Whoever is admitted again is not evicted any more.
            connection.execute("DELETE FROM own_expulsions WHERE run = ?", (self._run,))

        await self._database.transact(create)

    def next_index(self, validator: str, *, sealed: bool) -> int:
        """The index in a validator's log after the last entry kept, or kept under a seal."""
        rows = self._database.read(
            "SELECT max(position) FROM proofs WHERE run = ? AND validator = ? AND sealed_size >= ?",
            (self._run, validator, int(sealed)),
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
                    b"".join(receipt.proof), each.sealed_size, b"".join(each.sealed),
                )  # fmt: skip
                size = sum(len(value) for value in row if isinstance(value, bytes | str))
                connection.execute(
                    "INSERT OR REPLACE INTO proof_manifests VALUES (?, ?)",
                    (manifest.digest, manifest.raw),
                )
                connection.execute(
                    "INSERT OR REPLACE INTO proofs (run, validator, position, submission, "
                    "manifest, verdict, entry, head, proof, sealed_size, sealed_proof, bytes) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*row, size),
                )
            return self._make_room(connection)

        return await self._database.transact(run)

    async def keep_expulsions(self, manifest: Envelope, envelopes: Sequence[Envelope]) -> None:
        """Keep this worker's newest signed eviction and reinstatement."""
        rows = [(self._run, manifest.raw, envelope.raw) for envelope in envelopes]
        await self._database.transact(
            lambda connection: connection.executemany(
                "INSERT INTO own_expulsions VALUES (?, ?, ?)", rows
            )
        )

    def _make_room(self, connection: sqlite3.Connection) -> int:
        rows = connection.execute(
            "SELECT number, bytes FROM proofs WHERE run = ? ORDER BY number DESC", (self._run,)
        )
        total, dropped = 0, []
        for number, size in rows:
            total += size
            if total > self._most_bytes:
                dropped.append((number,))
        connection.executemany("DELETE FROM proofs WHERE number = ?", dropped)
        connection.execute(
            "DELETE FROM proof_manifests WHERE digest NOT IN (SELECT manifest FROM proofs)"
        )
        return len(dropped)


def proven_in(row: Sequence[Any]) -> Proven:
    """The proof in a row of `KEPT_PROOFS`; raises `Dropped` for damaged envelopes."""
    manifest, verdict, entry, index, head, proof, sealed_size, sealed = row
    receipt = Receipt(open_envelope(verdict), entry, index, open_envelope(head), _hashes(proof))
    return Proven(open_envelope(manifest), receipt, sealed_size, _hashes(sealed))


def _hashes(raw: bytes) -> list[bytes]:
    return [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]
