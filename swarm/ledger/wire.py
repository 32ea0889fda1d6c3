"""Requests and answers of the ledger protocol: `/swarm/ledger/2.0.0`.

A stream carries one request at a time. Requests and answers are msgpack arrays `[tag, fields…]`,
one per frame. The client checks everything against a head that the log's owner signed. A trusted
peer also serves its mirrors of the others' logs, so that a lost log can be restored."""

from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.ledger import merkle
from swarm.ledger.entries import ENTRY_BYTES_MAX
from swarm.wire.envelope import ENVELOPE_BYTES_MAX, Dropped, Envelope, open_envelope
from swarm.wire.messages import Count, Digest, LogHead, Present

_Raw = Annotated[bytes, Meta(max_length=ENVELOPE_BYTES_MAX)]


class ForkEvidence(msgspec.Struct, array_like=True, frozen=True):
    """Two signed `LogHead` envelopes of one log, in the order in which they were received.

    If the second has as many entries or fewer, the signatures alone prove the fork. If it has more,
    whoever holds the entries of either head can prove it (`swarm.ledger.audit`)."""

    first: _Raw
    second: _Raw

    def opened(self) -> tuple[Envelope, Envelope]:
        """Both heads, with checked signatures; raises `ValueError` if they are no evidence."""
        try:
            first, second = open_envelope(self.first), open_envelope(self.second)
        except Dropped as dropped:
            raise ValueError(f"evidence of a fork holds an invalid head ({dropped})") from dropped
        if not (isinstance(first.message, LogHead) and isinstance(second.message, LogHead)):
            raise ValueError("evidence of a fork holds something else than heads")
        if (first.sender, first.body.run) != (second.sender, second.body.run):
            raise ValueError("evidence of a fork holds heads of different logs")
        return first, second


def contradiction(first: Envelope, second: Envelope) -> str | None:
    """How two heads of one log contradict each other by their signatures alone, or None."""
    older, newer = sorted((first, second), key=lambda head: head.body.sequence)
    before, after = older.expect(LogHead), newer.expect(LogHead)
    if after.size < before.size:
        return f"it signed a head of {after.size} entries after one of {before.size}"
    if after.size == before.size and after.root != before.root:
        return f"it signed two different heads of {before.size} entries"
    return None


def explained(first: Envelope, second: Envelope) -> str:
    """One sentence about two heads of one log that a trusted peer keeps as contradictory."""
    sizes = sorted(head.expect(LogHead).size for head in (first, second))
    return contradiction(first, second) or (
        f"its head of {sizes[1]} entries does not follow from its head of {sizes[0]}"
    )


ENTRIES_MAX = 512
"""Most log entries in one answer."""

RECEIPTS_MAX = 64
"""Most receipts in one answer. A receipt is an entry and an envelope of at most 64 KiB."""

EXPULSIONS_MAX = 2
"""Messages about one peer in one answer: the newest eviction and the newest reinstatement."""

FORKS_MAX = 64
"""Most contradictions between heads in one answer; an honest run has none."""

FAULT_RECORD_BYTES_MAX = 3 * ENVELOPE_BYTES_MAX + 64
"""The three envelopes of a `FaultRecord`."""

REINSTATEMENT_BYTES_MAX = 4096
"""Largest signed reinstatement; its reason has at most 500 characters."""

REQUEST_BYTES_MAX = REINSTATEMENT_BYTES_MAX + 64

FAULT_BYTES_MAX = 512 * 1024
"""Bytes of a fault's file in one answer."""

REQUEST_SECONDS = 10.0
"""Deadline of one request; also the time that a server waits for the next request on a stream."""

PROTOCOL = "/swarm/ledger/2.0.0"

_Owner = Annotated[str, Meta(max_length=64)]

_Many = Annotated[int, Meta(ge=1, le=ENTRIES_MAX)]

_Receipts = Annotated[int, Meta(ge=1, le=RECEIPTS_MAX)]

_RawEntry = Annotated[bytes, Meta(max_length=ENTRY_BYTES_MAX)]

_RawEnvelope = Annotated[bytes, Meta(max_length=ENVELOPE_BYTES_MAX)]


class _Struct(msgspec.Struct, array_like=True, frozen=True):
    pass


class HeadRequest(_Struct, frozen=True, tag="head"):
    """The signed head of the server's own log or of one of its mirrors."""

    owner: _Owner


class EntriesRequest(_Struct, frozen=True, tag="entries"):
    owner: _Owner
    start: Count
    count: _Many


class OriginRequest(_Struct, frozen=True, tag="origin"):
    """Where the server's copy of a log begins."""

    owner: _Owner


class InclusionsRequest(_Struct, frozen=True, tag="inclusions"):
    """Proofs that the entries `indices` are among the first `size` entries of a log."""

    owner: _Owner
    indices: Annotated[list[Count], Meta(max_length=RECEIPTS_MAX)]
    size: Count


class ConsistencyRequest(_Struct, frozen=True, tag="consistency"):
    owner: _Owner
    old: Count
    new: Count


class VerdictsRequest(_Struct, frozen=True, tag="verdicts"):
    """Receipts in the server's own log from index `start` on, in order; worker "": of all."""

    worker: _Owner
    start: Count
    limit: _Receipts


class ReinstateRequest(_Struct, frozen=True, tag="reinstate"):
    """Asks a trusted peer to log and spread the owner's signed `Reinstatement`."""

    envelope: Annotated[bytes, Meta(max_length=REINSTATEMENT_BYTES_MAX)]


class StatusRequest(_Struct, frozen=True, tag="status"):
    """The progress of the run, and the peers that take part."""


class ExpulsionsRequest(_Struct, frozen=True, tag="expulsions"):
    """The evictions and reinstatements of one peer."""

    peer: _Owner


class FaultRequest(_Struct, frozen=True, tag="fault"):
    """The signed messages that, with the file, prove a fault of this worker's submission."""

    submission: Digest
    worker: _Owner


class FaultFileRequest(_Struct, frozen=True, tag="fault_file"):
    """The file of a proven fault, from a byte on."""

    submission: Digest
    start: Count


Request = (
    HeadRequest
    | EntriesRequest
    | OriginRequest
    | InclusionsRequest
    | ConsistencyRequest
    | VerdictsRequest
    | StatusRequest
    | ExpulsionsRequest
    | ReinstateRequest
    | FaultRequest
    | FaultFileRequest
)


class Head(_Struct, frozen=True, tag="head"):
    envelope: _RawEnvelope
    """A `LogHead` envelope; empty if the server does not hold this log."""


class Entries(_Struct, frozen=True, tag="entries"):
    entries: Annotated[list[_RawEntry], Meta(max_length=ENTRIES_MAX)]
    """The first of the requested entries, as many as fit into an answer; at least one if any."""


_Hashes = Annotated[list[Digest], Meta(max_length=merkle.PROOF_LENGTH_MAX)]


class Origin(_Struct, frozen=True, tag="origin"):
    start: Count
    """Index of the first entry that is not pruned."""
    hashes: _Hashes
    """The largest complete subtrees before it, from left to right."""


class Proof(_Struct, frozen=True, tag="proof"):
    hashes: _Hashes


class Proofs(_Struct, frozen=True, tag="proofs"):
    proofs: Annotated[list[_Hashes], Meta(max_length=RECEIPTS_MAX)]
    """In the order of the requested indices."""


class LoggedVerdict(_Struct, frozen=True):
    index: Count
    entry: _RawEntry
    envelope: _RawEnvelope


class Verdicts(_Struct, frozen=True, tag="verdicts"):
    verdicts: Annotated[list[LoggedVerdict], Meta(max_length=RECEIPTS_MAX)]


class Status(_Struct, frozen=True, tag="status"):
    envelopes: Annotated[list[_RawEnvelope], Meta(max_length=3)]
    """The newest manifest, checkpoint and step order, as far as they exist."""
    present: Annotated[list[Present], Meta(max_length=8192)]
    """The peers that trusted peers have heard from, most recent first, as many as fit."""
    forks: Annotated[list[ForkEvidence], Meta(max_length=FORKS_MAX)] = []
    """Contradictory heads of trusted peers' logs that the server received."""
    evaluation: _RawEnvelope = b""
    """The newest result on held-out tasks; empty without one."""


class Expulsions(_Struct, frozen=True, tag="expulsions"):
    envelopes: Annotated[list[_RawEnvelope], Meta(max_length=EXPULSIONS_MAX)]
    """The newest envelopes."""


class FaultFound(_Struct, frozen=True, tag="fault"):
    record: Annotated[bytes, Meta(max_length=FAULT_RECORD_BYTES_MAX)]
    """An encoded `FaultRecord`; empty if the server does not keep the evidence."""
    size_bytes: Count


class FaultBytes(_Struct, frozen=True, tag="fault_file"):
    data: Annotated[bytes, Meta(max_length=FAULT_BYTES_MAX)]


class Refusal(_Struct, frozen=True, tag="refused"):
    reason: Annotated[str, Meta(max_length=500)]


Answer = (
    Head
    | Entries
    | Origin
    | Proof
    | Proofs
    | Verdicts
    | Status
    | Expulsions
    | FaultFound
    | FaultBytes
    | Refusal
)

request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)

answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

encoder = msgspec.msgpack.Encoder()
