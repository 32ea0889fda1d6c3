"""Notices of relays: a peer learns why its relayed connection to another has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from swarm.events import Events, Rationed
from swarm.transport import Stream, StreamError, Transport
from swarm.wire.identity import PeerId

log = logging.getLogger(__name__)

PROTOCOL = "/swarm/relay-notice/1.0.0"

FRAME_BYTES_MAX = 256
"""A notice has about 70 bytes."""

TELL_SECONDS = 5.0
"""Deadline of a notice. Nothing depends on its arrival."""

LIMITS = {"bytes": "it carries no more bytes of one connection", "time": "it was open long enough"}
"""Limits that end a circuit, with what a person reads."""


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """A circuit has ended by a limit."""

    other: Annotated[str, Meta(max_length=100)]
    """The peer at its other end."""
    limit: Annotated[str, Meta(max_length=20)]
    """A key of `LIMITS`."""


_decode = msgspec.msgpack.Decoder(Notice).decode
_encode = msgspec.msgpack.Encoder().encode


class Notices:
    """Sends a relay's notices, and reports those of relays that this peer uses."""

    def __init__(
        self,
        transport: Transport,
        knows: Callable[[PeerId], bool],
        events: Events | None,
        nursery: trio.Nursery,
    ) -> None:
        """`knows`: whether this peer has asked a relay for anything."""
        self._transport = transport
        self._knows = knows
        self._events = Rationed(events) if events is not None else None
        self._nursery = nursery

    def tell(self, peer: PeerId, other: PeerId, limit: str) -> None:
        """Tell a peer, soon, that its circuit to another has reached a limit."""
        self._nursery.start_soon(self._send, peer, Notice(other, limit))

    async def _send(self, peer: PeerId, notice: Notice) -> None:
        with trio.move_on_after(TELL_SECONDS):
            try:
                stream = await self._transport.open_stream(peer, PROTOCOL)
                await stream.send(_encode(notice))
                await stream.end()
            except StreamError as error:
                log.debug("notice to %s: %s", peer, error)

    async def serve(self, stream: Stream) -> None:
        """The handler of `PROTOCOL`."""
        frame = await stream.receive()
        try:
            notice = _decode(frame or b"")
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StreamError("that is no notice of a relay") from error
        if self._knows(stream.peer) and notice.limit in LIMITS and self._events is not None:
            self._events.emit(
                "transport.relay_limit",
                relay=stream.peer,
                remote=notice.other,
                reason=LIMITS[notice.limit],
            )
