"""Receipts as small JSON files that anyone can check offline: a verdict, proven to be in a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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
