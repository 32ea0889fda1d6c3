"""Requests to other peers: a stream, the message, the answer, and one deadline for all of it.

Streams are kept for the next request, since opening one costs a round trip. A peer that closes its
stream after each message (some generic nodes do) costs a new stream per request, nothing else.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass

import trio

from swarm.errors import DeadlineError
from swarm.kademlia import wire
from swarm.kademlia.wire import Message, Neighbour
from swarm.transport import Framing, Stream, StreamError, Transport
from swarm.wire.identity import PeerId
from swarm.world import World

REQUEST_SECONDS_MAX = 10.0
"""Deadline of one request, its connection included."""

OUTBOUND_IDLE_SECONDS = 30.0
"""A stream idle for this long is not reused: well before the other side resets it."""

OUTBOUND_STREAMS_MAX = 64
"""Idle streams kept for reuse: one per peer, the most recently used ones."""


@dataclass
class _Idle:
    stream: Stream
    until: float


class Requests:
    """Outgoing requests of one peer."""

    def __init__(self, transport: Transport, world: World) -> None:
        self._transport = transport
        self._world = world
        self._idle: OrderedDict[PeerId, _Idle] = OrderedDict()

    async def ask(self, to: Neighbour, message: Message) -> Message:
        """Send a request and return its answer.

        Raises `ConnectError`, `StreamError`, `WireError`, or `DeadlineError` after
        `REQUEST_SECONDS_MAX`: all of them `PeerError`.
        """
        with trio.move_on_after(REQUEST_SECONDS_MAX):
            return await self._ask(to, message)
        raise self._late(to, message)

    async def tell(self, to: Neighbour, message: Message) -> None:
        """Send a message without an answer (ADD_PROVIDER).

        Returns once the peer has closed or reset the stream. Raises the same errors as `ask`.
        """
        with trio.move_on_after(REQUEST_SECONDS_MAX):
            stream = await self._open(to)
            try:
                await stream.send(wire.encode(message))
                await stream.end()
                with contextlib.suppress(StreamError):  # js-libp2p resets a stream ended by us
                    while await stream.receive() is not None:
                        pass  # some implementations echo the message
            except BaseException:
                await _reset(stream)
                raise
            return
        raise self._late(to, message)

    async def close(self) -> None:
        """Reset the streams kept for reuse."""
        while self._idle:
            _, idle = self._idle.popitem()
            await _reset(idle.stream)

    async def _ask(self, to: Neighbour, message: Message) -> Message:
        data = wire.encode(message)
        idle = self._idle.pop(to.peer, None)
        if idle is not None and idle.until > self._world.now():
            try:
                return await self._exchange(idle.stream, data, message)
            except StreamError:
                idle = None  # closed since the last request: try a new stream
        if idle is not None:
            await _reset(idle.stream)
        return await self._exchange(await self._open(to), data, message)

    async def _open(self, to: Neighbour) -> Stream:
        await self._transport.connect(to.peer, to.addresses)
        return await self._transport.open_stream(to.peer, wire.PROTOCOL, Framing.DELIMITED)

    async def _exchange(self, stream: Stream, data: bytes, message: Message) -> Message:
        try:
            await stream.send(data)
            frame = await stream.receive()
            if frame is None:
                raise StreamError(f"{stream.peer} closed the stream without an answer")
            answer = wire.decode(frame)
            if answer.type != message.type:
                raise wire.WireError(
                    f"{stream.peer} answered {message.type.name} with {answer.type.name}"
                )
        except BaseException:
            await _reset(stream)
            raise
        await self._keep(stream)
        return answer

    async def _keep(self, stream: Stream) -> None:
        """Keep a stream for the next request; reset streams kept too long, or beyond the limit."""
        now = self._world.now()
        surplus = [self._idle.pop(stream.peer, None)]
        self._idle[stream.peer] = _Idle(stream, now + OUTBOUND_IDLE_SECONDS)
        while (
            len(self._idle) > OUTBOUND_STREAMS_MAX or next(iter(self._idle.values())).until <= now
        ):
            surplus.append(self._idle.popitem(last=False)[1])
        for idle in surplus:
            if idle is not None:
                await _reset(idle.stream)

    def _late(self, to: Neighbour, message: Message) -> DeadlineError:
        return DeadlineError(
            f"{to.peer} did not answer {message.type.name} within {REQUEST_SECONDS_MAX:g} s"
        )


async def _reset(stream: Stream) -> None:
    """Reset a stream, even when cancelled: it must not give the next request an old answer."""
    with trio.move_on_after(1, shield=True):
        await stream.reset()
