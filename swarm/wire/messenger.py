"""Signed requests and replies between two peers, over one stream each way while they have any.

The protocol is `/swarm/message/2.0.0`. A frame is msgpack `[id, envelopes]`. The
requester chooses `id` and the reply repeats it. The first envelope of a request is the message;
further ones support it, for example an admission. The peer at the other end of the stream must have
signed the message, so that it cannot replay another peer's. A repeated event is handled again,
because a peer whose reply was lost must be able to repeat its request. Handlers are keyed by
content, so that a repetition does no harm."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from swarm.errors import DECODE_ERRORS, DeadlineError, PeerError
from swarm.events import Events
from swarm.transport import Stream, StreamError, Transport
from swarm.transport.rates import TokenBuckets
from swarm.wire.envelope import (
    BAN_SECONDS,
    ENVELOPE_BYTES_MAX,
    FORGED,
    INVALID_MAX,
    SENDER_RATE_BURST,
    SENDER_RATE_PER_SECOND,
    SENDERS_REMEMBERED_MAX,
    Dropped,
    Envelope,
    Gate,
    open_envelope,
)
from swarm.wire.identity import PeerId
from swarm.wire.messages import Message, StateMessage
from swarm.world.tasks import Lifetime

REQUEST_DEADLINE_SECONDS = 10.0
"""Default deadline for the reply to a request."""

REQUESTS_OPEN_MAX = 64
"""Number of unanswered requests that one peer may have at another. One more resets the stream."""

REQUEST_ENVELOPES_MAX = 8
"""Number of envelopes in one request or reply: the message and its supporting envelopes."""

LINE_SECONDS = 15.0
"""A stream without a request for this long is ended. It outlasts the pause of 10 s between two
heartbeats; an older one would keep its connection from being closed for a peer that needs it more.
"""

PROTOCOL = "/swarm/message/2.0.0"

_Raw = Annotated[bytes, Meta(max_length=ENVELOPE_BYTES_MAX)]


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    id: Annotated[int, Meta(ge=0, le=2**53)]
    envelopes: Annotated[list[_Raw], Meta(max_length=REQUEST_ENVELOPES_MAX)]


_decoder = msgspec.msgpack.Decoder(_Frame)
_encoder = msgspec.msgpack.Encoder()

Handler = Callable[[Envelope, Sequence[Envelope]], Awaitable[Sequence[Envelope]]]
"""A function from a message and its supporting envelopes to the envelopes of the reply."""


class _Line:
    """An outgoing stream to one peer, with its open requests."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.used_at = trio.current_time()
        self.next_id = 0
        self.waiting: dict[int, trio.MemorySendChannel[list[bytes]]] = {}


class Messenger:
    """Sends requests to other peers and answers theirs. Requests need a running `run()`."""

    def __init__(self, transport: Transport, gate: Gate, events: Events) -> None:
        self._transport = transport
        self._gate = gate
        self._events = events
        self._handlers: dict[type[Message], tuple[Handler, Lifetime]] = {}
        self._lines: dict[PeerId, _Line] = {}
        self._opening: dict[PeerId, trio.Lock] = {}
        self._nursery: trio.Nursery | None = None
        self._rates = TokenBuckets(
            SENDER_RATE_PER_SECOND, SENDER_RATE_BURST, SENDERS_REMEMBERED_MAX
        )

    @asynccontextmanager
    async def answering(self, handlers: Mapping[type[Message], Handler]) -> AsyncIterator[None]:
        """Answer these kinds of request inside the block.

        At its end, cancels the handlers that are still running and waits for them. A request
        without a handler gets an empty reply. Raises `ValueError` if a kind has a handler already.
        """
        for kind in handlers:
            if kind in self._handlers:
                raise ValueError(f"{kind.__name__} has a handler already")
        async with Lifetime() as lifetime:
            self._handlers |= {kind: (handler, lifetime) for kind, handler in handlers.items()}
            try:
                yield
            finally:
                for kind in handlers:
                    del self._handlers[kind]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the background tasks until cancelled."""
        self._transport.serve(PROTOCOL, self._serve, frame_bytes_max=ENVELOPE_BYTES_MAX * 9)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                await trio.sleep(LINE_SECONDS / 3)
                await self._end_unused()

    async def _end_unused(self) -> None:
        """End streams on which nothing was asked for a while."""
        since = trio.current_time() - LINE_SECONDS
        for peer, line in list(self._lines.items()):
            # Its reader may have dropped it, or a request used it, while another one was ended.
            is_open = self._lines.get(peer) is line
            if is_open and not line.waiting and line.used_at <= since:
                del self._lines[peer]  # first, so that no request takes it meanwhile
                with suppress(StreamError):
                    await line.stream.end()

    async def request(
        self, peer: PeerId, *envelopes: Envelope, deadline_seconds: float = REQUEST_DEADLINE_SECONDS
    ) -> list[Envelope]:
        """Send a message to a connected peer and wait for its reply.

        Only the signatures of the reply are checked. Raises a `DeadlineError` that names the peer,
        or `PeerError` if the stream breaks."""
        try:
            with trio.fail_after(deadline_seconds):
                raws = await self._ask(peer, [envelope.raw for envelope in envelopes])
        except trio.TooSlowError as error:
            line = self._lines.pop(peer, None)
            if line is not None:
                await line.stream.reset()
            raise DeadlineError(
                f"{peer} did not answer a {envelopes[0].body.kind} within {deadline_seconds:g} s"
            ) from error
        try:
            return [open_envelope(raw) for raw in raws]
        except Dropped as dropped:
            raise PeerError(f"{peer} answered with an invalid envelope ({dropped})") from dropped

    async def _ask(self, peer: PeerId, raws: list[bytes]) -> list[bytes]:
        line = await self._line(peer)
        line.used_at = trio.current_time()
        line.next_id += 1
        identifier = line.next_id
        send, receive = trio.open_memory_channel[list[bytes]](1)
        line.waiting[identifier] = send
        try:
            await line.stream.send(_encoder.encode(_Frame(identifier, raws)))
            return await receive.receive()
        except trio.EndOfChannel as error:
            raise PeerError(f"{peer} broke the stream before it answered") from error
        finally:
            line.waiting.pop(identifier, None)

    async def _line(self, peer: PeerId) -> _Line:
        if (line := self._lines.get(peer)) is not None:
            return line
        lock = self._opening.setdefault(peer, trio.Lock())
        try:
            async with lock:
                line = self._lines.get(peer)
                if line is None:
                    if self._nursery is None:
                        raise RuntimeError("Messenger.run() is not running")
                    line = _Line(await self._transport.open_stream(peer, PROTOCOL))
                    self._lines[peer] = line
                    self._nursery.start_soon(self._read_replies, peer, line)
                return line
        finally:
            if not lock.locked():  # nobody waits for it
                self._opening.pop(peer, None)

    async def _read_replies(self, peer: PeerId, line: _Line) -> None:
        try:
            while (raw := await line.stream.receive()) is not None:
                frame = _decoder.decode(raw)
                channel = line.waiting.get(frame.id)
                if channel is not None:
                    channel.send_nowait(frame.envelopes)
                    line.waiting.pop(frame.id, None)
        except (StreamError, *DECODE_ERRORS) as error:
            self._events.emit("messenger.line_broke", remote=peer, reason=str(error))
        finally:
            if self._lines.get(peer) is line:
                del self._lines[peer]
            for channel in line.waiting.values():
                channel.close()
            await line.stream.reset()

    async def _serve(self, stream: Stream) -> None:
        limit = trio.Semaphore(REQUESTS_OPEN_MAX)
        forged: list[str] = []

        async def answer(frame: _Frame) -> None:
            try:
                replies = await self._answer(stream.peer, frame.envelopes, forged)
                await stream.send(
                    _encoder.encode(_Frame(frame.id, [reply.raw for reply in replies]))
                )
            except StreamError as error:
                self._events.emit("messenger.reply_lost", remote=stream.peer, reason=str(error))
            finally:
                limit.release()

        async with trio.open_nursery() as nursery:
            try:
                while (raw := await stream.receive()) is not None:
                    await self._turn(stream.peer)
                    limit.acquire_nowait()
                    nursery.start_soon(answer, _decoder.decode(raw))
            except (StreamError, *DECODE_ERRORS, trio.WouldBlock) as error:
                self._events.emit(
                    "messenger.stream_refused", remote=stream.peer, reason=repr(error)
                )
                nursery.cancel_scope.cancel()
                await stream.reset()

    async def _turn(self, peer: PeerId) -> None:
        """Wait until a peer may make its next request. Beyond its rate the gate would drop it, and
        an empty reply at once would be followed by the next request at once."""
        if not self._gate.trusts(peer):
            now, rate = trio.current_time(), self._rates.of(peer)
            rate.borrow(1, now)
            if seconds := rate.debt_seconds(now):
                await trio.sleep(seconds)

    async def _answer(
        self, peer: PeerId, raws: list[bytes], forged: list[str]
    ) -> Sequence[Envelope]:
        try:
            if not raws:
                raise Dropped("malformed", "an empty request")
            envelope = open_envelope(raws[0])
            if envelope.sender != peer:
                raise Dropped("not_its_sender", f"{peer} sent a message of {envelope.sender}")
            if type(envelope.message) not in self._handlers:
                return []  # no handler wants it, so the gate need not remember it
            try:
                self._gate.admit(envelope.raw)
            except Dropped as dropped:
                if dropped.cause != "duplicate" or isinstance(envelope.message, StateMessage):
                    raise
            supporting = [open_envelope(raw) for raw in raws[1:]]
        except Dropped as dropped:
            self._events.emit("messenger.dropped", remote=peer, cause=dropped.cause)
            if dropped.cause in FORGED:
                forged.append(dropped.cause)
            if len(forged) == INVALID_MAX:
                self._events.emit("messenger.peer_banned", remote=peer, causes=forged)
                self._transport.ban(peer, BAN_SECONDS)
            return []
        handler, lifetime = self._handlers[type(envelope.message)]
        return await lifetime.run(handler, envelope, supporting) or []


def first(envelopes: Sequence[Envelope], message_type: type[Message]) -> Envelope | None:
    """Return the first envelope with a message of this type, if there is one."""
    return next((e for e in envelopes if isinstance(e.message, message_type)), None)
