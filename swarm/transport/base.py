"""Base class of the transports: handlers, connection events, bans, and the tasks of streams."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarm.errors import PeerError
from swarm.transport import BulkService, ConnectionEvent, Stream, StreamHandler, Traffic, limits
from swarm.transport.framing import ByteStream, FramedStream
from swarm.transport.room import kept_of
from swarm.wire.identity import Identity, PeerId
from swarm.world import Disk, World

log = logging.getLogger(__name__)

STREAMS_HELD_BYTES_MAX = 64 << 20
"""Bytes of unfinished frames on all streams; an honest one is soon finished. Beyond it the
fullest stream of the peer that holds most is reset, strangers first."""

STREAMS_PER_PEER_MAX = 64
"""Streams that one remote peer may have open at once; more are reset. A role uses about ten."""

VOUCHED_SWEPT_MIN = 64
"""Fewer vouched peers are not looked through."""

CONNECTION_EVENTS_MAX = 1024
"""Events kept for a subscriber that lags: more than a peer has connections."""


@dataclass(frozen=True)
class Handler:
    run: StreamHandler
    frame_bytes_max: int


class BaseTransport:
    """The parts of `swarm.transport.Transport` that do not depend on what carries the bytes."""

    def __init__(
        self, identity: Identity, *, world: World, disk: Disk, nursery: trio.Nursery
    ) -> None:
        self.peer_id = identity.peer_id
        self._identity = identity
        self._world = world
        self._disk = disk
        self._nursery = nursery
        self._handlers: dict[str, Handler] = {}
        self._service: BulkService | None = None
        self._credential = b""
        self.traffic = Traffic()
        self._banned_until: dict[PeerId, float] = {}
        self._vouched_until: dict[PeerId, float] = {}
        self._vouched_swept = 0
        """Number of vouched peers after those whose time is over were last forgotten."""
        self._keeps_many = False
        self._served_streams: Counter[PeerId] = Counter()
        self._holding: dict[FramedStream, None] = {}
        """Streams with bytes of unfinished frames."""
        self._held_bytes = 0
        self._subscribers: list[
            tuple[
                trio.MemorySendChannel[ConnectionEvent], trio.MemoryReceiveChannel[ConnectionEvent]
            ]
        ] = []

    def serve(
        self,
        protocol: str,
        handler: StreamHandler,
        *,
        frame_bytes_max: int = limits.FRAME_BYTES_MAX,
    ) -> None:
        """Answer a protocol; `ValueError` if it is answered already."""
        if protocol in self._handlers:
            raise ValueError(f"{protocol} is served already")
        self._handlers[protocol] = Handler(handler, frame_bytes_max)

    def serve_bulk(self, service: BulkService) -> None:
        """Answer the bulk plane; `ValueError` if it is answered already."""
        if self._service is not None:
            raise ValueError("the bulk plane is served already")
        self._service = service

    def set_credential(self, credential: bytes) -> None:
        self._credential = credential

    def connection_events(self) -> trio.MemoryReceiveChannel[ConnectionEvent]:
        send, receive = trio.open_memory_channel[ConnectionEvent](CONNECTION_EVENTS_MAX)
        self._subscribers.append((send, receive))
        return receive

    def _emit(self, event: ConnectionEvent) -> None:
        for subscriber in list(self._subscribers):
            send, receive = subscriber
            try:
                send.send_nowait(event)
            except trio.WouldBlock:
                receive.receive_nowait()
                send.send_nowait(event)
            except trio.BrokenResourceError:
                send.close()
                self._subscribers.remove(subscriber)

    def _close_subscriptions(self) -> None:
        for send, _ in self._subscribers:
            send.close()
        self._subscribers.clear()

    def _ban(self, peer: PeerId, seconds: float) -> None:
        now = self._world.now()
        self._banned_until = {p: t for p, t in self._banned_until.items() if t > now}
        self._banned_until[peer] = max(self._banned_until.get(peer, 0.0), now + seconds)

    def _is_banned(self, peer: PeerId) -> bool:
        return self._banned_until.get(peer, 0.0) > self._world.now()

    def vouch(self, peer: PeerId, seconds: float) -> None:
        now = self._world.now()
        # Every heartbeat and greeting comes here: look through all only once they have doubled.
        if len(self._vouched_until) > 2 * self._vouched_swept:
            self._vouched_until = {p: t for p, t in self._vouched_until.items() if t > now}
            self._vouched_swept = max(VOUCHED_SWEPT_MIN, len(self._vouched_until))
        self._vouched_until[peer] = max(self._vouched_until.get(peer, 0.0), now + seconds)

    def keep_many(self) -> None:
        self._keeps_many = True

    def _kept(self, most: int) -> int:
        return kept_of(most) if self._keeps_many else min(limits.CONNECTIONS_KEPT, kept_of(most))

    async def _trim(self, idle: Callable[[], None]) -> None:
        """Call `idle`, which closes idle connections, again and again until cancelled."""
        while True:
            await trio.sleep(limits.CONNECTION_TRIM_SECONDS)
            idle()

    def _is_vouched(self, peer: PeerId) -> bool:
        return self._vouched_until.get(peer, 0.0) > self._world.now()

    def _is_trusted(self, peer: PeerId) -> bool:
        """Whether a peer is vouched for without end, as the run's trainers and validators are."""
        return self._vouched_until.get(peer, 0.0) == math.inf

    def _on_held(self, stream: FramedStream, change_bytes: int) -> None:
        """Count bytes that streams hold; beyond the limit, reset the fullest stream of the peer
        that holds most, strangers first."""
        self._held_bytes += change_bytes
        if not stream.held_bytes:
            self._holding.pop(stream, None)
            return
        self._holding[stream] = None
        if self._held_bytes > STREAMS_HELD_BYTES_MAX:
            held: Counter[PeerId] = Counter()
            for each in self._holding:
                held[each.peer] += each.held_bytes
            peer = max(held, key=lambda peer: (not self._is_vouched(peer), held[peer]))
            own = (each for each in self._holding if each.peer == peer)
            fullest = max(own, key=lambda each: each.held_bytes)
            fullest.drop("the streams of this peer hold too many bytes")
            self._nursery.start_soon(fullest.reset)

    def _admit_stream(self, peer: PeerId, protocol: str) -> Handler | None:
        """An opened stream's handler, counted until `_release_stream`; None refuses the stream."""
        handler = self._handlers.get(protocol)
        if handler is None or self._is_banned(peer):
            return None
        if self._served_streams[peer] >= STREAMS_PER_PEER_MAX:
            log.debug("%s has %d streams open", peer, self._served_streams[peer])
            return None
        self._served_streams[peer] += 1
        return handler

    async def _serve_stream(
        self, carrier: ByteStream, peer: PeerId, protocol: str, handler: Handler
    ) -> None:
        """Run a handler admitted by `_admit_stream` to its end. Raises nothing but cancellation."""
        stream = FramedStream(
            carrier,
            peer=peer,
            protocol=protocol,
            frame_bytes_max=handler.frame_bytes_max,
            on_held=self._on_held,
        )
        try:
            await self._handle_stream(stream, handler)
        finally:
            self._release_stream(peer)

    @staticmethod
    async def _handle_stream(stream: Stream, handler: Handler) -> None:
        """Run a handler, then end or reset its stream. Raises nothing but cancellation."""
        try:
            await handler.run(stream)
            await stream.end()
            with trio.move_on_after(limits.STREAM_LINGER_SECONDS):
                while await stream.receive() is not None:
                    pass
        except Exception as error:
            _report(error, stream.peer, stream.protocol)
        finally:
            await stream.reset()  # does nothing to a stream that both sides have ended

    def _release_stream(self, peer: PeerId) -> None:
        self._served_streams[peer] -= 1
        if not self._served_streams[peer]:
            del self._served_streams[peer]


def _report(error: Exception, peer: PeerId, protocol: str) -> None:
    """Log the remote peer's fault as a debug line, our own as a traceback; go on after either."""
    if _is_peer_fault(error):
        log.debug("%s with %s: %s", protocol, peer, error)
    else:
        log.error("the handler of %s failed on %s", protocol, peer, exc_info=error)


def _is_peer_fault(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_peer_fault(inner) for inner in error.exceptions)
    return isinstance(error, PeerError)
