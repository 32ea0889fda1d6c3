"""Requests and answers of the ledger protocol: `/swarm/ledger/1.0.0`, framing SWARM.

One stream, one request at a time: a msgpack array `[tag, fields…]`, answered by one frame of the
same kind. The asking side checks everything against a head that the log's owner signed. A trusted
peer also hands out its mirrors of the others' logs, so that a lost one can be restored.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.envelope import ENVELOPE_BYTES_MAX
from swarm.ledger import merkle
from swarm.ledger.entries import ENTRY_BYTES_MAX
from swarm.messages import Count, Digest, Present

ENTRIES_MAX = 512
"""Log entries in one answer."""

RECEIPTS_MAX = 64
"""Receipts in one answer, each of an entry and an envelope of at most 64 KiB."""

EXPULSIONS_MAX = 2
"""Of one peer in one answer: the newest eviction and the newest reinstatement."""

REQUEST_SECONDS = 10.0
"""One request for part of a log; also how long a server waits for the next on a stream."""

PROTOCOL = "/swarm/ledger/1.0.0"

_Owner = Annotated[str, Meta(max_length=64)]

_Many = Annotated[int, Meta(ge=1, le=ENTRIES_MAX)]

_Receipts = Annotated[int, Meta(ge=1, le=RECEIPTS_MAX)]

_RawEntry = Annotated[bytes, Meta(max_length=ENTRY_BYTES_MAX)]

_RawEnvelope = Annotated[bytes, Meta(max_length=ENVELOPE_BYTES_MAX)]


class _Struct(msgspec.Struct, array_like=True, frozen=True):
    pass


class HeadRequest(_Struct, frozen=True, tag="head"):
    """The signed head of the server's log, or of its mirror of another's."""

    owner: _Owner


class EntriesRequest(_Struct, frozen=True, tag="entries"):
    owner: _Owner
    start: Count
    count: _Many


class InclusionsRequest(_Struct, frozen=True, tag="inclusions"):
    """Proofs that the entries `indices` stand in the first `size` entries of a log."""

    owner: _Owner
    indices: Annotated[list[Count], Meta(max_length=RECEIPTS_MAX)]
    size: Count


class ConsistencyRequest(_Struct, frozen=True, tag="consistency"):
    owner: _Owner
    old: Count
    new: Count


class VerdictsRequest(_Struct, frozen=True, tag="verdicts"):
    """Receipts of one worker from log index `start` on, in order; the server's own only."""

    worker: _Owner
    start: Count
    limit: _Receipts


class StatusRequest(_Struct, frozen=True, tag="status"):
    """How far the run is, and who takes part."""


class ExpulsionsRequest(_Struct, frozen=True, tag="expulsions"):
    """The evictions and reinstatements of one peer."""

    peer: _Owner


Request = (
    HeadRequest
    | EntriesRequest
    | InclusionsRequest
    | ConsistencyRequest
    | VerdictsRequest
    | StatusRequest
    | ExpulsionsRequest
)


class Head(_Struct, frozen=True, tag="head"):
    envelope: _RawEnvelope
    """A `LogHead`; empty when the server has nothing of this log."""


class Entries(_Struct, frozen=True, tag="entries"):
    entries: Annotated[list[_RawEntry], Meta(max_length=ENTRIES_MAX)]
    """As many of those asked for as fit an answer, at least one if there is one."""


_Hashes = Annotated[list[Digest], Meta(max_length=merkle.PROOF_LENGTH_MAX)]


class Proof(_Struct, frozen=True, tag="proof"):
    hashes: _Hashes


class Proofs(_Struct, frozen=True, tag="proofs"):
    proofs: Annotated[list[_Hashes], Meta(max_length=RECEIPTS_MAX)]
    """In the order of the indices asked for."""


class LoggedVerdict(_Struct, frozen=True):
    index: Count
    entry: _RawEntry
    envelope: _RawEnvelope


class Verdicts(_Struct, frozen=True, tag="verdicts"):
    verdicts: Annotated[list[LoggedVerdict], Meta(max_length=RECEIPTS_MAX)]


class Status(_Struct, frozen=True, tag="status"):
    envelopes: Annotated[list[_RawEnvelope], Meta(max_length=3)]
    """The newest manifest, checkpoint and step order, as far as there are any."""
    present: Annotated[list[Present], Meta(max_length=8192)]
    """Those of whom a trusted peer has heard, as many as fit, the freshest first."""


class Expulsions(_Struct, frozen=True, tag="expulsions"):
    envelopes: Annotated[list[_RawEnvelope], Meta(max_length=EXPULSIONS_MAX)]
    """The newest ones."""


class Refusal(_Struct, frozen=True, tag="refused"):
    reason: Annotated[str, Meta(max_length=500)]


Answer = Head | Entries | Proof | Proofs | Verdicts | Status | Expulsions | Refusal

request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)

answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

encoder = msgspec.msgpack.Encoder()
