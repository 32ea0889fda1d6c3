"""The proofs that a worker keeps of its own work, in its database; `swarm ledger prove` reads them.

A trusted peer deletes entries of its log one epoch after they are sealed; these proofs stay.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from swarm.ledger.proof_file import Proven
from swarm.ledger.receipts import Receipt
from swarm.wire.envelope import Envelope, open_envelope
from swarm.world import Database

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
