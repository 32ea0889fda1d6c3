"""Reading another trusted peer's ledger."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import trio
from blake3 import blake3

from swarm.errors import DECODE_ERRORS, DeadlineError, PeerError
from swarm.ledger import wire
from swarm.ledger.faults import FaultRecord, decode_record
from swarm.transport import Stream, StreamError, Transport
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import LogHead

AnswerT = TypeVar("AnswerT", bound=wire.Answer)


class Refused(PeerError):
    """The peer answered that it cannot answer."""


class LedgerClient:
    """Sends requests to one peer over one stream. Checks types and bounds; callers check proofs."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def peer(self) -> PeerId:
        return self._stream.peer

    def opened(self, raw: bytes, what: str) -> Envelope:
        """An envelope that the peer sent; raises `PeerError` for an invalid one."""
        try:
            return open_envelope(raw)
        except Dropped as dropped:
            raise PeerError(f"{self.peer} sent an invalid {what} ({dropped})") from dropped

    async def head(self, owner: str) -> Envelope | None:
        """The newest head of `owner`'s log that the peer holds; its signature is checked."""
        answer = await self._ask(wire.HeadRequest(owner), wire.Head)
        if not answer.envelope:
            return None
        head = self.opened(answer.envelope, "log head")
        if head.sender != owner or not isinstance(head.message, LogHead):
            raise PeerError(f"{self.peer} sent something else than the head of {owner}")
        return head

    async def entries(self, owner: str, start: int, count: int) -> list[bytes]:
        """Fetch 1 to `count` entries from index `start` on."""
        count = min(count, wire.ENTRIES_MAX)
        entries = (await self._ask(wire.EntriesRequest(owner, start, count), wire.Entries)).entries
        if not 0 < len(entries) <= count:
            raise PeerError(
                f"{self.peer} sent {len(entries)} log entries where 1 to {count} were asked for"
            )
        return entries

    async def origin(self, owner: str) -> wire.Origin:
        """Fetch where the peer's copy of `owner`'s log begins; the caller checks the hashes."""
        return await self._ask(wire.OriginRequest(owner), wire.Origin)

    async def entries_or_origin(
        self, owner: str, start: int, count: int
    ) -> tuple[list[bytes], wire.Origin | None]:
        """Fetch entries from index `start` on, or, if they are pruned there, from where the peer's
        copy begins; then the origin says where that is."""
        try:
            return await self.entries(owner, start, count), None
        except Refused:
            origin = await self.origin(owner)
            if not start < origin.start < start + count:
                raise
        held = origin.start - start
        return await self.entries(owner, origin.start, count - held), origin

    async def inclusions(self, owner: str, indices: Sequence[int], size: int) -> list[list[bytes]]:
        """Fetch the inclusion proofs of one page of receipts, in the order of `indices`."""
        if not indices:
            return []
        request = wire.InclusionsRequest(owner, list(indices), size)
        proofs = (await self._ask(request, wire.Proofs)).proofs
        if len(proofs) != len(indices):
            raise PeerError(f"{self.peer} sent {len(proofs)} proofs for {len(indices)} receipts")
        return proofs

    async def consistency(self, owner: str, old: int, new: int) -> list[bytes]:
        return (await self._ask(wire.ConsistencyRequest(owner, old, new), wire.Proof)).hashes

    async def verdicts(self, worker: str, start: int) -> list[wire.LoggedVerdict]:
        request = wire.VerdictsRequest(worker, start, wire.RECEIPTS_MAX)
        return (await self._ask(request, wire.Verdicts)).verdicts

    async def status(self) -> wire.Status:
        return await self._ask(wire.StatusRequest(), wire.Status)

    async def expulsions(self, peer: str) -> wire.Expulsions:
        """Fetch a peer's signed evictions and reinstatements; the caller checks them."""
        return await self._ask(wire.ExpulsionsRequest(peer), wire.Expulsions)

    async def reinstate(self, envelope: Envelope) -> None:
        """Hand over the owner's signed reinstatement; the peer has logged it on return."""
        await self._ask(wire.ReinstateRequest(envelope.raw), wire.Expulsions)

    async def fault(self, submission: bytes, worker: str) -> tuple[FaultRecord, int] | None:
        """Fetch the messages that prove a fault, and the size of its file; None if not kept."""
        answer = await self._ask(wire.FaultRequest(submission, worker), wire.FaultFound)
        if not answer.record:
            return None
        try:
            return decode_record(answer.record), answer.size_bytes
        except ValueError as error:
            raise PeerError(f"{self.peer} sent {error}") from error

    async def fault_file(self, submission: bytes, size_bytes: int) -> bytes:
        """Fetch the file of a proven fault and check that it is the one its worker announced."""
        data = bytearray()
        while len(data) < size_bytes:
            request = wire.FaultFileRequest(submission, len(data))
            part = (await self._ask(request, wire.FaultBytes)).data
            if not part:
                break
            data += part
        if blake3(data).digest() != submission:
            raise PeerError(f"{self.peer} sent another file than the worker announced")
        return bytes(data)

    async def _ask(self, request: wire.Request, expected: type[AnswerT]) -> AnswerT:
        peer = self.peer
        try:
            with trio.fail_after(wire.REQUEST_SECONDS):
                await self._stream.send(wire.encoder.encode(request))
                raw = await self._stream.receive()
        except trio.TooSlowError:
            raise DeadlineError(
                f"{peer} did not answer about its ledger within {wire.REQUEST_SECONDS:g} s"
            ) from None
        if raw is None:
            raise StreamError(f"{peer} ended the ledger stream before it answered")
        try:
            answer = wire.answer_decoder.decode(raw)
        except DECODE_ERRORS as error:
            raise PeerError(f"{peer} sent a malformed ledger answer ({error})") from error
        if isinstance(answer, wire.Refusal):
            raise Refused(f"{peer} refused a ledger request: {answer.reason}")
        if not isinstance(answer, expected):
            raise PeerError(f"{peer} sent an unexpected kind of answer")
        return answer


@asynccontextmanager
async def open_ledger(transport: Transport, peer: PeerId) -> AsyncIterator[LedgerClient]:
    """Open a client for a connected peer's ledger; raises `StreamError`."""
    stream = await transport.open_stream(peer, wire.PROTOCOL)
    try:
        yield LedgerClient(stream)
        await stream.end()
    finally:
        await stream.reset()


async def own_head(client: LedgerClient) -> Envelope:
    """Fetch the signed head of a peer's own log; raises `PeerError` if the peer keeps no log."""
    head = await client.head(client.peer)
    if head is None:
        raise PeerError(f"{client.peer} keeps no ledger: only trainers and validators do")
    return head
