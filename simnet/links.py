"""Connections of the simulated network and the streams on them.

A message is one entry of the timeline: its size over the uplink, then the latency with jitter; a
lost packet costs a retransmission's delay. Messages in one direction stay in order, as over TCP.

A hash of (seed, link, time of connecting, n) decides the n-th message's delay, and costs no
memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from simnet.bulk import BulkPlane
from simnet.clock import derive
from simnet.lines import Line
from swarm.transport import ConnectionEvent, StreamError, limits
from swarm.transport.base import Handler
from swarm.transport.room import Origin, is_full, least_useful, origin_of, surplus
from swarm.wire.identity import Identity, PeerId
from swarm.world import Disk, World

if TYPE_CHECKING:
    from simnet.network import SimulatedNetwork

RETRANSMISSION_SECONDS = 0.2
"""Shortest delay of a lost packet: Linux's smallest retransmission timeout."""

SILENCE_SECONDS = limits.CONNECTION_PING_SECONDS + limits.CONNECTION_PONG_SECONDS
"""Time without an arrival after which a connection ends."""

_MASK = (1 << 64) - 1
_HEAD_BYTES = 3
"""Size of the length before most frames."""

_FRAME_COST_BYTES = 64
"""Window that a frame uses beside its bytes."""


def mix(number: int) -> int:
    """Hash a number to 64 bits with the finalizer of SplitMix64 (Steele et al. 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def travel_seconds(base: float, jitter: float, loss: float, draw: int) -> float:
    """One message's latency: `base` seconds, a random share up to `jitter` more, and
    retransmissions with probability `loss` each. `draw`: 64 random bits."""
    seconds = base * (1.0 + jitter * (draw >> 32) * 2.0**-32)
    if loss and (draw & 0xFFFFFFFF) * 2.0**-32 < loss:
        wait = RETRANSMISSION_SECONDS + 2 * base
        while (draw & 0xFFFFFFFF) * 2.0**-32 < loss:
            seconds += wait
            wait *= 2
            draw = mix(draw)
    return seconds


class Endpoint(BulkPlane):
    """A peer's end of its connections."""

    def __init__(
        self,
        network: SimulatedNetwork,
        identity: Identity,
        host: str,
        line: Line,
        *,
        world: World,
        disk: Disk,
        nursery: trio.Nursery,
    ) -> None:
        super().__init__(network, identity, host, line, world=world, disk=disk, nursery=nursery)
        self.relay = False
        """Whether it carries connections of peers behind NAT."""
        self._reservations: dict[PeerId, str] = {}
        """Addresses of the relays that hold this peer's reservations."""
        self.carried: dict[Connection, None] = {}
        """As a relay: connections of other peers, each by the end that dialled."""
        self.reserved_by: dict[PeerId, None] = {}
        """As a relay: peers that hold a reservation here."""
        self.connections: dict[PeerId, Connection] = {}
        self._connected_sorted: list[PeerId] | None = None

    def connected(self) -> Sequence[PeerId]:
        if self._connected_sorted is None:
            self._connected_sorted = sorted(self.connections)
        return self._connected_sorted

    def remember(self, connection: Connection) -> None:
        self.connections[connection.peer.peer_id] = connection
        self._connected_sorted = None

    def forget(self, connection: Connection) -> None:
        del self.connections[connection.peer.peer_id]
        self._connected_sorted = None
        self.reserved_by.pop(connection.peer.peer_id, None)
        if connection.via is not None:
            connection.via.carried.pop(connection, None)

    def makes_room(self, newcomer: BulkPlane) -> bool:
        """Whether there is room for one more connection, after closing an idle one if necessary."""
        held = list(self.connections.values())
        if is_full(held, limits.CONNECTIONS_MAX):
            useless = least_useful(held, origin_of(newcomer.host))
            if useless is None:
                return False
            useless.close("the connection made way for another")
        return True

    async def keep_few(self) -> None:
        """Close idle connections beyond those kept, until cancelled."""

        def close_idle() -> None:
            for each in surplus(self.connections.values(), self._kept(limits.CONNECTIONS_MAX)):
                each.close("nobody used the connection")

        await self._trim(close_idle)

    def network_of(self, peer: PeerId) -> str:
        held = self.connections.get(peer)
        return held.origin.public_range if held is not None and held.via is None else ""

    async def serve_stream(self, stream: SimulatedStream, handler: Handler) -> None:
        """Run a handler admitted by `_admit_stream` to its end; raises only cancellation."""
        try:
            await self._handle_stream(stream, handler)
        finally:
            self._release_stream(stream.peer)


@dataclass(slots=True, eq=False, repr=False)
class Connection:
    """One side of a connection, which sends to the other side, `twin`."""

    _network: SimulatedNetwork
    owner: Endpoint
    peer: Endpoint
    via: Endpoint | None = None
    """The relay that carries the connection; None when it is direct."""
    twin: Connection = field(init=False)
    streams: dict[SimulatedStream, None] = field(default_factory=dict)
    asking: dict[trio.Event, None] = field(default_factory=dict)
    """Events of waiting round trips, set when the connection ends."""
    closed: bool = False
    """Whether this side sends nothing any more."""
    opened_at: float = field(default_factory=trio.current_time)
    used_at: float = field(init=False)
    link: int = field(init=False)
    _latency: float = field(init=False)
    _seed: int = field(init=False)
    _number: int = 0
    _line_free_at: float = 0.0
    _arrived_at: float = 0.0
    _is_stuck: bool = False
    """Whether a packet was lost so often that the next attempt is far off; all messages wait."""
    _held: list[tuple[int, Callable[..., object], tuple[Any, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.used_at = self.opened_at
        self.link = self._network.link(self.owner, self.peer)
        self._latency = self._network.path_latency(self.owner, self.via, self.peer)
        self._seed = mix(self._network.link_seed ^ mix(self.link) ^ hash(self.opened_at))

    # --- how useful it is to its owner ---

    @property
    def origin(self) -> Origin:
        return origin_of((self.via or self.peer).host)

    @property
    def vouched(self) -> bool:
        return self.owner._is_vouched(self.peer.peer_id)

    @property
    def idle(self) -> bool:
        if self.streams or self.asking:
            return False
        owner, peer = self.owner, self.peer.peer_id
        if peer in owner.reserved_by or peer in owner._reservations:
            return False
        return trio.current_time() - self.opened_at >= limits.CONNECTION_GRACE_SECONDS

    def drop(self, stream: SimulatedStream) -> None:
        if self.streams.pop(stream, self) is None:
            self.used_at = trio.current_time()

    # --- messages ---

    def send(self, size_bytes: int, action: Callable[..., object], *args: Any) -> None:
        """Send a message; call `action(*args)` when it arrives."""
        if self.closed:
            return
        network = self._network
        if self._is_cut():
            self._held.append((size_bytes, action, args))
            return
        owner = self.owner
        network.count_message(owner.peer_id)
        network.bytes_sent += size_bytes
        network.bytes_by_sender[owner.peer_id] += size_bytes
        network.bytes_by_receiver[self.peer.peer_id] += size_bytes
        self._number += 1
        free_at = max(trio.current_time(), self._line_free_at)
        self._line_free_at = free_at + size_bytes / owner.line.uplink_bytes_per_second
        # By counter, so that this message's fate depends on no other link's traffic.
        draw = mix(self._seed + self._number)
        loss = network.loss(owner.peer_id, self.peer.peer_id)
        latency = travel_seconds(self._latency, network.weather.jitter, loss, draw)
        # A lost packet holds up all that were sent after it, as in TCP.
        self._arrived_at = max(self._arrived_at, self._line_free_at + latency)
        if self._arrived_at - trio.current_time() > SILENCE_SECONDS and not self._is_stuck:
            self._is_stuck = True  # no ping gets through either
            for way in (self, self.twin):
                name = f"{way.owner.peer_id}>{way.peer.peer_id}"
                network.at(trio.current_time() + SILENCE_SECONDS, name, way.lose)
        network.timeline.at_link(
            self._arrived_at, self.link, network.messages, self._arrive, action, args
        )

    def _is_cut(self) -> bool:
        network, via = self._network, self.via
        if via is None:
            return network.is_cut(self.owner, self.peer)
        return network.is_cut(self.owner, via) or network.is_cut(via, self.peer)

    def make_direct(self) -> None:
        self.via = None
        self._latency = self._network.path_latency(self.owner, None, self.peer)

    def duplicates(self, protocol: str) -> int:
        return self._network.duplicates(self.peer.peer_id, protocol)

    def _arrive(self, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.closed:
            return
        if self._is_cut():
            self._held.append((0, action, args))
        else:
            action(*args)

    def flow_again(self) -> None:
        """Send again, after a cut, the data that TCP has kept."""
        held, self._held = self._held, []
        for size_bytes, action, args in held:
            self.send(size_bytes, action, *args)

    async def round_trip(self) -> None:
        """Wait for a round trip, in order with the messages under way, or the connection's end."""
        answered = trio.Event()
        self.asking[answered] = None
        self.send(32, self.twin.send, 32, answered.set)
        try:
            await answered.wait()
        finally:
            del self.asking[answered]

    # --- the end of it ---

    def close(self, reason: str, tell: bool = True) -> None:
        """End the connection on this side, and notify the other side if possible."""
        if self.owner.connections.get(self.peer.peer_id) is not self:
            return
        self.owner.forget(self)
        for stream in list(self.streams):
            stream.break_(reason)
        for answered in self.asking:
            answered.set()
        self.owner._emit(ConnectionEvent(self.peer.peer_id, connected=False))
        if tell:
            self.send(1, self.twin.close, reason, False)

    def lose(self) -> None:
        self.close("the connection was lost", tell=False)
        self.closed = True


@dataclass(slots=True, eq=False, repr=False)
class SimulatedStream:
    """One end of a stream: `swarm.transport.Stream`, with the bounds and failures of
    `swarm.transport.framing` and the window of yamux, but without encoding frames to bytes."""

    _connection: Connection
    protocol: str
    _frame_bytes_max: int
    peer: PeerId = field(init=False)
    far: SimulatedStream = field(init=False)
    _queue: list[bytes] = field(default_factory=list)
    _changed: trio.Event | None = None
    _turn: trio.Lock | None = None  # one sender at a time waits for window
    _window: int = limits.STREAM_WINDOW_BYTES  # bytes that this side may still send
    _granted: int = limits.STREAM_WINDOW_BYTES  # the other side may still send these
    _consumed: int = 0  # received, not yet granted again
    _local_ended: bool = False
    _remote_ended: bool = False
    _failure: str | None = None

    def __post_init__(self) -> None:
        self.peer = self._connection.peer.peer_id
        self._connection.streams[self] = None
        self._connection.used_at = trio.current_time()

    # --- the Stream interface ---

    async def send(self, frame: bytes) -> None:
        if not frame:
            raise ValueError("a frame is never empty")
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._window > 0 and not self._is_turn_taken():
            self._put(frame)
            return
        async with self._take_turn():
            await self._wait_for_window()
            self._put(frame)

    async def receive(self) -> bytes | None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._consumed * 2 >= limits.STREAM_WINDOW_BYTES:
            self._grant()
        while not self._queue:
            if self._remote_ended:
                return None
            if self._failure is not None:
                raise self._error(self._failure)
            await self._change()
        frame = self._queue.pop(0)
        self._consumed += len(frame) + _FRAME_COST_BYTES
        return frame

    async def end(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._is_turn_taken():
            self._end()
            return
        async with self._take_turn():
            self._end()

    async def reset(self) -> None:
        self.reset_now()

    def reset_now(self) -> None:
        if self._failure is None and not self._over:
            self._queue.clear()
            self._fail("reset by this side")

    # --- the transport's side ---

    def break_(self, reason: str) -> None:
        """Fail the stream: the other side reset it, or the connection ended."""
        if self._failure is None and not self._over:
            self._failure = reason
            self._wake()
        self._connection.drop(self)

    # --- inside ---

    @property
    def _over(self) -> bool:
        return self._local_ended and self._remote_ended

    def _put(self, frame: bytes) -> None:
        self._check_writable()
        self._window -= len(frame) + _FRAME_COST_BYTES
        connection = self._connection
        connection.send(len(frame) + _HEAD_BYTES, self.far._take, frame)
        for _ in range(connection.duplicates(self.protocol)):
            connection.send(len(frame) + _HEAD_BYTES, self.far._take, frame)

    def _take(self, frame: bytes) -> None:
        if self._failure is not None:
            return
        if self._remote_ended:
            self._fail("broke the framing: a frame after END")
        elif len(frame) > self._frame_bytes_max:
            self._fail(
                f"broke the framing: a frame of {len(frame)} bytes, at most "
                f"{self._frame_bytes_max} allowed"
            )
        elif self._granted <= 0:
            self._fail("broke the framing: sent more than the window allows")
        else:
            self._granted -= len(frame) + _FRAME_COST_BYTES
            self._queue.append(frame)
            self._wake()

    def _grant(self) -> None:
        """Grant new window for consumed bytes, half a window at a time."""
        consumed, self._consumed = self._consumed, 0
        self._granted += consumed
        if not self._remote_ended and self._failure is None:
            self._connection.send(_HEAD_BYTES, self.far._take_window, consumed)

    def _take_window(self, granted: int) -> None:
        self._window += granted
        self._wake()

    def _end(self) -> None:
        if self._local_ended:
            return
        self._check_writable()
        self._local_ended = True
        self._connection.send(1, self.far._take_end)
        self._forget_if_over()

    def _take_end(self) -> None:
        self._remote_ended = True
        self._wake()
        self._forget_if_over()

    def _forget_if_over(self) -> None:
        if self._over:
            self._connection.drop(self)

    def _take_turn(self) -> trio.Lock:
        if self._turn is None:
            self._turn = trio.Lock()
        return self._turn

    def _is_turn_taken(self) -> bool:
        return self._turn is not None and self._turn.locked()

    async def _wait_for_window(self) -> None:
        seconds = limits.STREAM_SEND_DEADLINE_SECONDS
        with trio.move_on_after(seconds) as scope:
            while self._window <= 0:
                self._check_writable()
                await self._change()
        if scope.cancelled_caught:
            self.reset_now()
            raise self._error(f"has not read for {seconds:g} s")

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise self._error(self._failure)
        if self._local_ended:
            raise ValueError("this side has said END already")

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._wake()
        self._connection.drop(self)
        self._connection.send(1, self.far.break_, "reset by the other side")

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _error(self, reason: str) -> StreamError:
        return StreamError(f"stream {self.protocol} with {self.peer}: {reason}")


def link_seed(seed: int) -> int:
    return int.from_bytes(derive(seed, "links")[:8], "big")
