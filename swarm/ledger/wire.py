"""Reading another trusted peer's ledger: `/swarm/ledger/1.0.0`, framing SWARM.

One stream, one request at a time: a msgpack array `[tag, fields…]`, answered by one frame of the
same kind. Whoever asks checks everything against a head that the log's owner signed. A trusted
peer also hands out its mirrors of the others' logs, so that a lost one can be restored.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar

import msgspec
import trio
from msgspec import Meta

from swarm.envelope import ENVELOPE_BYTES_MAX, Dropped, Envelope, open_envelope
from swarm.errors import DeadlineError, PeerError
from swarm.identity import PeerId
from swarm.ledger import merkle
from swarm.ledger.entries import ENTRY_BYTES_MAX, Entry, Judged, decode, judged
from swarm.ledger.log import Log
from swarm.lifetime import Lifetime
from swarm.messages import Count, Digest, LogHead, Present, Verdict
from swarm.transport import Stream, StreamError, Transport

if TYPE_CHECKING:
    from swarm.node.node import Node

ENTRIES_MAX = 512
"""Log entries in one answer."""

RECEIPTS_MAX = 64
"""Receipts in one answer, each of an entry and an envelope of at most 64 KiB."""

EXPULSIONS_MAX = 2
"""Of one peer in one answer: the newest eviction and the newest reinstatement."""

ANSWER_BYTES_MAX = 512 * 1024
"""Bytes of entries in one answer; a single entry always fits."""

REQUEST_SECONDS = 10.0
"""One request for part of a log; also how long a server waits for the next on a stream."""

FETCH_ENTRIES_MAX = 10_000_000
"""A log longer than this is not pulled whole: about 2 GB."""

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

_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()
AnswerT = TypeVar("AnswerT", Head, Entries, Proof, Proofs, Verdicts, Status, Expulsions)


# --- serving -----------------------------------------------------------------------------------


class Ledger(Protocol):
    """What is served (`swarm.run.trusted.TrustedPart`)."""

    def log_of(self, owner: str) -> Log | None:
        """The log or mirror held of a trusted peer."""
        ...

    async def head_of(self, owner: str) -> Envelope | None:
        """Its newest signed head; everything below it is held."""
        ...

    def verdicts_of(
        self, worker: str, start: int, limit: int
    ) -> Sequence[tuple[int, bytes, bytes]]:
        """(log index, entry, envelope) of this peer's own verdicts on a worker."""
        ...

    def status(self) -> tuple[Sequence[bytes], Sequence[Present]]:
        """The newest manifest, checkpoint and order, and those who are there."""
        ...

    def expulsions_of(self, peer: str) -> Sequence[bytes]:
        """The signed evictions and reinstatements known of a peer, newest last."""
        ...


@asynccontextmanager
async def serving_ledger(transport: Transport, ledger: Ledger) -> AsyncIterator[None]:
    """Let anyone read the logs held here, inside the block; once per transport."""

    async def converse(stream: Stream) -> None:
        while True:
            with trio.move_on_after(REQUEST_SECONDS) as idle:
                raw = await stream.receive()
            if idle.cancelled_caught or raw is None:
                return
            try:
                answer = await _answer(ledger, _request_decoder.decode(raw))
            except ValueError as error:  # a msgspec error is one too
                answer = Refusal(str(error)[:500])
            await stream.send(_encoder.encode(answer))

    async with Lifetime() as lifetime:
        transport.serve(
            PROTOCOL, lambda stream: lifetime.run(converse, stream), frame_bytes_max=1024
        )
        yield


async def _answer(ledger: Ledger, request: Request) -> Answer:
    if isinstance(request, VerdictsRequest):
        return _verdicts(ledger, request)
    if isinstance(request, StatusRequest):
        return _status(ledger)
    if isinstance(request, ExpulsionsRequest):
        return Expulsions(list(ledger.expulsions_of(request.peer))[-EXPULSIONS_MAX:])
    if isinstance(request, HeadRequest):
        head = await ledger.head_of(request.owner)
        return Head(head.raw if head is not None else b"")
    log = ledger.log_of(request.owner)
    if log is None:
        raise ValueError(f"no log of {request.owner} is held here")
    if isinstance(request, EntriesRequest):
        count = _fitting(log.entry_sizes(request.start, request.count))
        return Entries(log.entries(request.start, count))
    if isinstance(request, InclusionsRequest):
        return Proofs([log.inclusion(index, request.size) for index in request.indices])
    return Proof(log.consistency(request.old, request.new))


def _verdicts(ledger: Ledger, request: VerdictsRequest) -> Verdicts:
    rows = ledger.verdicts_of(request.worker, request.start, request.limit)
    rows = rows[: _fitting([len(entry) + len(envelope) for _, entry, envelope in rows])]
    return Verdicts([LoggedVerdict(*row) for row in rows])


def _status(ledger: Ledger) -> Status:
    envelopes, present = ledger.status()
    freshest = sorted(present, key=lambda entry: (entry.age_seconds, entry.peer))
    fitting = _fitting([len(_encoder.encode(entry)) for entry in freshest])
    return Status(list(envelopes), freshest[: min(fitting, 8192)])


def _fitting(sizes: Sequence[int]) -> int:
    """How many of the first items fit one answer; at least one."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > ANSWER_BYTES_MAX and count > 0:
            return count
    return len(sizes)


# --- asking ------------------------------------------------------------------------------------


class LedgerClient:
    """A stream of requests to one peer. Checks types and bounds; callers check proofs."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def peer(self) -> PeerId:
        return self._stream.peer

    async def head(self, owner: str) -> Envelope | None:
        """The newest head of `owner`'s log held there, its signature checked."""
        answer = await self._ask(HeadRequest(owner), Head)
        if not answer.envelope:
            return None
        try:
            head = open_envelope(answer.envelope)
        except Dropped as dropped:
            raise PeerError(f"{self._stream.peer} sent an invalid log head ({dropped})") from None
        if head.sender != owner or not isinstance(head.message, LogHead):
            raise PeerError(f"{self._stream.peer} sent something else than the head of {owner}")
        return head

    async def entries(self, owner: str, start: int, count: int) -> list[bytes]:
        """At least one and up to `count` entries from `start` on."""
        count = min(count, ENTRIES_MAX)
        entries = (await self._ask(EntriesRequest(owner, start, count), Entries)).entries
        if not 0 < len(entries) <= count:
            raise PeerError(
                f"{self._stream.peer} sent {len(entries)} log entries where 1 to {count} "
                "were asked for"
            )
        return entries

    async def inclusions(self, owner: str, indices: Sequence[int], size: int) -> list[list[bytes]]:
        """The proofs of one page of receipts, in the order of `indices`."""
        if not indices:
            return []
        proofs = (await self._ask(InclusionsRequest(owner, list(indices), size), Proofs)).proofs
        if len(proofs) != len(indices):
            raise PeerError(
                f"{self._stream.peer} sent {len(proofs)} proofs for {len(indices)} receipts"
            )
        return proofs

    async def consistency(self, owner: str, old: int, new: int) -> list[bytes]:
        return (await self._ask(ConsistencyRequest(owner, old, new), Proof)).hashes

    async def verdicts(self, worker: str, start: int) -> list[LoggedVerdict]:
        request = VerdictsRequest(worker, start, RECEIPTS_MAX)
        return (await self._ask(request, Verdicts)).verdicts

    async def status(self) -> Status:
        return await self._ask(StatusRequest(), Status)

    async def expulsions(self, peer: str) -> list[bytes]:
        """Signed evictions and reinstatements; the caller checks them."""
        return (await self._ask(ExpulsionsRequest(peer), Expulsions)).envelopes

    async def _ask(self, request: Request, expected: type[AnswerT]) -> AnswerT:
        peer = self._stream.peer
        try:
            with trio.fail_after(REQUEST_SECONDS):
                await self._stream.send(_encoder.encode(request))
                raw = await self._stream.receive()
        except trio.TooSlowError:
            raise DeadlineError(
                f"{peer} did not answer about its ledger within {REQUEST_SECONDS:g} s"
            ) from None
        if raw is None:
            raise StreamError(f"{peer} ended the ledger stream before it answered")
        try:
            answer = _answer_decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise PeerError(f"{peer} sent a malformed ledger answer ({error})") from error
        if isinstance(answer, Refusal):
            raise PeerError(f"{peer} refused a ledger request: {answer.reason}")
        if not isinstance(answer, expected):
            raise PeerError(f"{peer} sent an answer of another kind than asked for")
        return answer


@asynccontextmanager
async def open_ledger(transport: Transport, peer: PeerId) -> AsyncIterator[LedgerClient]:
    """A client for a connected peer's ledger; raises `StreamError`."""
    stream = await transport.open_stream(peer, PROTOCOL)
    try:
        yield LedgerClient(stream)
        await stream.end()
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await stream.reset()


@dataclass(frozen=True)
class FetchedLedger:
    """A whole log, proven to be what its owner signed."""

    head: Envelope
    entries: list[Entry]


async def fetch_ledger(node: Node, peer: PeerId) -> FetchedLedger:
    """Pull the whole log of a trusted peer and verify it against the head it signs.

    Raises `PeerError` when it cannot be reached, is too slow, or the log is not what was signed.
    """
    await node.reach(peer)
    async with open_ledger(node.transport, peer) as client:
        head = await _own_head(client, peer)
        assert isinstance(head.message, LogHead)
        size = head.message.size
        if size > FETCH_ENTRIES_MAX:
            raise PeerError(f"the log of {peer} has {size} entries, too many to pull whole")
        peaks = merkle.Peaks()
        entries: list[Entry] = []
        while len(entries) < size:
            for raw in await client.entries(peer, len(entries), size - len(entries)):
                peaks.append(merkle.leaf_hash(raw))
                entries.append(_decoded(peer, raw))
    if peaks.root() != head.message.root:
        raise PeerError(f"the log that {peer} sent is not the one it signed")
    return FetchedLedger(head, entries)


@dataclass(frozen=True)
class Receipt:
    """A verdict, and the proof that it stands in its validator's log."""

    envelope: Envelope
    """The signed `Verdict`."""
    entry: bytes
    """The leaf: an encoded `Judged`."""
    index: int
    head: Envelope
    """The signed `LogHead` under which it is proven."""
    proof: list[bytes]

    @property
    def verdict(self) -> Verdict:
        assert isinstance(self.envelope.message, Verdict)
        return self.envelope.message

    @property
    def log_size(self) -> int:
        """Entries of the log when it was proven."""
        assert isinstance(self.head.message, LogHead)
        return self.head.message.size

    def problem(self) -> str | None:
        """Why this receipt proves nothing, or None. Needs nothing but the receipt."""
        head, verdict = self.head.message, self.envelope.message
        if not isinstance(head, LogHead) or not isinstance(verdict, Verdict):
            return "it is not a verdict with a log head"
        if self.head.sender != self.envelope.sender:
            return "verdict and head are signed by different peers"
        if self.head.body.run != self.envelope.body.run:
            return "verdict and head belong to different runs"
        try:
            entry = decode(self.entry)
        except ValueError as error:
            return str(error)
        if not isinstance(entry, Judged) or entry != judged(verdict):
            return "the log entry says something else than the verdict"
        if verdict.log_index != self.index:
            return f"the verdict names log index {verdict.log_index}, not {self.index}"
        leaf = merkle.leaf_hash(self.entry)
        if not merkle.verify_inclusion(leaf, self.index, head.size, self.proof, head.root):
            return "the inclusion proof does not hold"
        return None


async def receipts_of(client: LedgerClient, worker: str) -> list[Receipt]:
    """All receipts of a worker that a validator holds, in log order, each proven to be in its log.

    Raises `PeerError` when one is not, or the validator does not answer.
    """
    peer = client.peer
    receipts: list[Receipt] = []
    head = await _own_head(client, peer)
    assert isinstance(head.message, LogHead)
    start, size = 0, head.message.size
    while start < size:
        page = await client.verdicts(worker, start)
        if not page:
            break
        indices = [item.index for item in page]
        if indices[0] < start or indices != sorted(set(indices)):
            raise PeerError(f"{peer} sent receipts out of order")
        start = indices[-1] + 1
        page = [item for item in page if item.index < size]  # others: judged since
        proofs = await client.inclusions(peer, [item.index for item in page], size)
        for item, proof in zip(page, proofs, strict=True):
            receipt = Receipt(_opened(peer, item), item.entry, item.index, head, proof)
            problem = receipt.problem()
            if problem is None and receipt.verdict.worker != worker:
                problem = "it belongs to another worker"
            if problem is not None:
                raise PeerError(f"{peer} sent a bad receipt for entry {item.index}: {problem}")
            receipts.append(receipt)
    return receipts


async def _own_head(client: LedgerClient, peer: PeerId) -> Envelope:
    head = await client.head(peer)
    if head is None:
        raise PeerError(f"{peer} keeps no ledger: only trainers and validators do")
    return head


def _decoded(peer: PeerId, raw: bytes) -> Entry:
    try:
        return decode(raw)
    except ValueError as error:
        raise PeerError(f"{peer} sent {error}") from error


def _opened(peer: PeerId, item: LoggedVerdict) -> Envelope:
    try:
        return open_envelope(item.envelope)
    except Dropped as dropped:
        raise PeerError(f"{peer} sent an invalid receipt ({dropped})") from dropped
