"""A network in virtual time: regions, latency, loss, narrow lines, cuts, sudden death.

Control messages travel one by one. A message waits for its sender's line to that peer, takes its
size over the uplink, then the latency of the two regions with jitter; a lost packet costs a
retransmission's delay; messages of one connection and direction stay in order, as over TCP. Bulk
pieces are fluid transfers (`simnet.flows`). All randomness of a link comes from its own source.

What connections cost and when they end follows libp2p: connecting takes 250 ms and five round
trips; a peer whose process dies is missed at once, one that loses power or is cut off when a ping
goes unanswered (25 s).
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from simnet.bulk import BulkPlane
from simnet.flows import Flow, Flows
from simnet.seeded import source
from simnet.timeline import Timeline
from swarm import defaults
from swarm.identity import Identity, PeerId
from swarm.transport import (
    ConnectError,
    ConnectionEvent,
    Framing,
    Reachability,
    Stream,
    StreamError,
)
from swarm.world import Disk, World

CONNECT_SECONDS = 0.25
"""libp2p's least time to connect, measured on one machine."""

CONNECT_ROUND_TRIPS = 5
"""TCP, choosing noise, noise, choosing yamux, identify."""

RETRANSMISSION_SECONDS = 0.2
"""Least delay of a lost packet: Linux's smallest retransmission timeout."""

SILENCE_SECONDS = defaults.CONNECTION_PING_SECONDS + defaults.CONNECTION_PONG_SECONDS
"""A connection on which nothing arrives ends after this."""

PORT = 4001


@dataclass(frozen=True)
class Line:
    """A peer's access to the network."""

    region: str = "europe-west"
    uplink_bytes_per_second: float = 125e6
    downlink_bytes_per_second: float = 125e6


@dataclass(frozen=True)
class Weather:
    """What all links have in common."""

    jitter: float = 0.1
    """Latency is up to this part longer, evenly distributed."""
    loss: float = 0.001
    """Part of the packets that is lost."""
    local_seconds: float = 0.002
    """One-way latency within a region."""


REGIONS = ("us-east", "us-west", "europe-west", "europe-east", "asia-east", "asia-south", "brazil")

LATENCY_SECONDS_RANGE = (0.02, 0.15)
"""One-way latency between two regions, drawn by seed for each pair."""

_Action = Callable[[], None]


class _Way:
    """One direction of a connection: messages in order, each at its time."""

    def __init__(
        self, network: SimulatedNetwork, sender: SimulatedTransport, receiver: SimulatedTransport
    ) -> None:
        self._network = network
        self._sender = sender
        self._receiver = receiver
        self._name = f"{sender.peer_id}>{receiver.peer_id}"
        self._line_free_at = 0.0
        self._arrived_at = 0.0
        self._held: list[tuple[int, _Action]] = []
        self.closed = False

    def send(self, size_bytes: int, action: _Action) -> None:
        """Have `action()` done when this message has arrived."""
        if self.closed:
            return
        if self._network.is_cut(self._sender, self._receiver):
            self._held.append((size_bytes, action))
            return
        now = trio.current_time()
        rate = self._sender.line.uplink_bytes_per_second
        self._line_free_at = max(now, self._line_free_at) + size_bytes / rate
        latency = self._network.draw_latency(self._sender, self._receiver)
        self._arrived_at = max(self._arrived_at, self._line_free_at + latency)
        self._network.at(self._arrived_at, self._name, functools.partial(self._arrive, action))

    def _arrive(self, action: _Action) -> None:
        if self.closed:
            return
        if self._network.is_cut(self._sender, self._receiver):
            self._held.append((0, action))
        else:
            action()

    def flow_again(self) -> None:
        """After a cut: what TCP has kept is sent again."""
        held, self._held = self._held, []
        for size_bytes, action in held:
            self.send(size_bytes, action)


class _Carrier:
    """One end of a stream: a `ByteStream`."""

    def __init__(self, connection: _Connection) -> None:
        connection.carriers[self] = None
        self._connection = connection
        self.far: _Carrier | None = None
        self._chunks: deque[bytes] = deque()
        self._closed = False
        self._closed_here = False
        self._broken: str | None = None
        self._changed = trio.Event()

    async def read(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._chunks:
            if self._broken is not None:
                raise StreamError(self._broken)
            if self._closed:
                return b""
            await self._changed.wait()
        return self._chunks.popleft()

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self._broken is not None:
            raise StreamError(self._broken)
        assert self.far is not None
        self._connection.way_out.send(len(data), functools.partial(self.far._take, data))

    async def close_write(self) -> None:
        assert self.far is not None
        self._closed_here = True
        self._connection.way_out.send(1, self.far._close)
        self._forget_if_over()

    async def reset(self) -> None:
        assert self.far is not None
        self._connection.way_out.send(
            1, functools.partial(self.far.break_, "reset by the other side")
        )
        self.break_("reset by this side")

    def break_(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            self._chunks.clear()
            self._wake()
        self._forget_if_over()

    def _take(self, data: bytes) -> None:
        if self._broken is None:
            self._chunks.append(data)
            self._wake()

    def _close(self) -> None:
        self._closed = True
        self._wake()
        self._forget_if_over()

    def _forget_if_over(self) -> None:
        if self._broken is not None or (self._closed and self._closed_here):
            self._connection.carriers.pop(self, None)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class _Connection:
    """What one side knows of a connection; `twin` is what the other side knows."""

    def __init__(self, owner: SimulatedTransport, peer: SimulatedTransport, way_out: _Way) -> None:
        self.owner = owner
        self.peer = peer
        self.way_out = way_out
        self.twin: _Connection | None = None
        self.carriers: dict[_Carrier, None] = {}
        self.asking: dict[trio.Event, None] = {}
        """Set when the connection ends."""

    def close(self, reason: str, *, tell: bool = True) -> None:
        """End it on this side, and tell the other one if that can be done."""
        if self.owner._connections.get(self.peer.peer_id) is not self:
            return
        del self.owner._connections[self.peer.peer_id]
        for carrier in list(self.carriers):
            carrier.break_(reason)
        for answered in self.asking:
            answered.set()
        self.owner._emit(ConnectionEvent(self.peer.peer_id, connected=False))
        if tell and self.twin is not None:
            self.way_out.send(1, functools.partial(self.twin.close, reason, tell=False))

    def lose(self) -> None:
        """Nothing was heard for too long."""
        self.close("the connection was lost", tell=False)
        self.way_out.closed = True

    def new_stream(self) -> tuple[_Carrier, _Carrier]:
        """Both ends of a new stream, which end with the connection."""
        assert self.twin is not None
        near, far = _Carrier(self), _Carrier(self.twin)
        near.far, far.far = far, near
        return near, far


class SimulatedNetwork:
    """Who is there, what lies between them, and what is broken. `async with network.running():`
    must be open while it is used."""

    def __init__(self, seed: int = 0, weather: Weather | None = None) -> None:
        self.seed = seed
        self.weather = weather or Weather()
        self.timeline = Timeline()
        self.flows = Flows(self.timeline)
        self.messages = 0
        """Control messages sent so far."""
        self.messages_by_sender: Counter[PeerId] = Counter()
        self._numbers: dict[str, int] = {}
        self._hosts: dict[PeerId, int] = {}
        """A peer keeps its address when it comes back."""
        self._here: dict[PeerId, SimulatedTransport] = {}
        self._by_host: dict[str, SimulatedTransport] = {}
        self._gone_dark: dict[str, None] = {}
        """Hosts that lost power: nobody there refuses a connection."""
        self._latencies: dict[tuple[str, str], float] = {}
        self._chances: dict[str, Callable[[], float]] = {}
        self._cuts: dict[tuple[PeerId, PeerId], int] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.timeline.run, name="simulated network")
            yield
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def transport(
        self, identity: Identity, *, world: World, disk: Disk, line: Line | None = None
    ) -> AsyncIterator[SimulatedTransport]:
        """A peer's end; leaving the block is the death of its process."""
        if identity.peer_id in self._here:
            raise ValueError(f"{identity.peer_id} is on this network already")
        number = self._hosts.setdefault(identity.peer_id, len(self._hosts))
        # Each in a /24 of its own, so that the DHT's bound per /24 takes them for strangers.
        host = f"{11 + (number >> 16)}.{number >> 8 & 255}.{number & 255}.1"
        async with trio.open_nursery() as nursery:
            transport = SimulatedTransport(
                self, identity, host, line or Line(), world=world, disk=disk, nursery=nursery
            )
            self._here[identity.peer_id] = self._by_host[host] = transport
            self._gone_dark.pop(host, None)
            try:
                yield transport
            finally:
                if self._here.get(identity.peer_id) is transport:
                    self.kill(identity.peer_id)
                transport._close_subscriptions()
                nursery.cancel_scope.cancel()

    # --- faults ---

    def cut(self, a: PeerId, b: PeerId, *, one_way: bool = False) -> None:
        """Let nothing pass from `a` to `b` (nor back, unless `one_way`). Neither is told: pings
        go unanswered, and pieces stall."""
        for pair in [(a, b)] if one_way else [(a, b), (b, a)]:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1
        self._lose_later(a, b)
        for flow in self._flows_between(a, b):
            self.stall(flow)

    def heal(self, a: PeerId, b: PeerId, *, one_way: bool = False) -> None:
        """Undo one `cut`."""
        for pair in [(a, b)] if one_way else [(a, b), (b, a)]:
            left = self._cuts.pop(pair, 0) - 1
            if left > 0:
                self._cuts[pair] = left
        for sender, receiver in ((a, b), (b, a)):
            connection = self._connection(sender, receiver)
            if connection is not None:
                connection.way_out.flow_again()
        here = [self._here.get(peer) for peer in (a, b)]
        if here[0] and here[1] and not self.is_silent(here[0], here[1]):
            for flow in self._flows_between(a, b):
                self.flows.resume(flow)

    def partition(self, one: Sequence[PeerId], other: Sequence[PeerId]) -> None:
        """Cut every link between two groups."""
        for a in one:
            for b in other:
                self.cut(a, b)

    def reunite(self, one: Sequence[PeerId], other: Sequence[PeerId]) -> None:
        """Undo a `partition` of the same groups."""
        for a in one:
            for b in other:
                self.heal(a, b)

    def kill(self, peer: PeerId) -> None:
        """A process dies: its machine closes its connections. Silent when it is not here."""
        transport = self._here.get(peer)
        if transport is None:
            return
        for connection in list(transport._connections.values()):
            connection.close("the connection was lost")
        self._remove(transport)

    def cut_power(self, peer: PeerId) -> None:
        """A machine is gone without a word. Its transport moves nothing from now on."""
        transport = self._here.get(peer)
        if transport is None:
            return
        self._gone_dark[transport.host] = None
        self._remove(transport)
        for connection in list(transport._connections.values()):
            connection.way_out.closed = True
            assert connection.twin is not None
            # Its own side ends now; the other one notices when a ping is not answered.
            connection.close("the machine has lost power", tell=False)
            connection.twin.way_out.closed = True
            self.at(
                trio.current_time() + SILENCE_SECONDS,
                f"{peer}>{connection.peer.peer_id}",
                connection.twin.lose,
            )

    def _remove(self, transport: SimulatedTransport) -> None:
        transport.gone = True
        del self._here[transport.peer_id]
        del self._by_host[transport.host]
        for flow in list(transport._transfers):
            if transport.host in self._gone_dark:
                self.stall(flow)
            else:
                self.flows.fail(flow, "broke off")

    def _lose_later(self, a: PeerId, b: PeerId) -> None:
        """Pings need both directions."""
        for sender, receiver in ((a, b), (b, a)):
            connection = self._connection(sender, receiver)
            if connection is not None:
                self.at(
                    trio.current_time() + SILENCE_SECONDS,
                    f"{sender}>{receiver}",
                    functools.partial(self._lose_if_cut, connection),
                )

    def _lose_if_cut(self, connection: _Connection) -> None:
        if self.is_silent(connection.owner, connection.peer):
            connection.lose()

    def _connection(self, owner: PeerId, peer: PeerId) -> _Connection | None:
        transport = self._here.get(owner)
        return transport._connections.get(peer) if transport is not None else None

    def _flows_between(self, a: PeerId, b: PeerId) -> list[Flow]:
        transport = self._here.get(a)
        if transport is None:
            return []
        return [flow for flow, ends in transport._transfers.items() if b in ends]

    def stall(self, flow: Flow) -> None:
        """Nothing of a transfer arrives; its receiver gives up if that lasts."""
        self.flows.pause(flow)
        left = self.flows.left_bytes(flow)

        def give_up() -> None:
            if self.flows.left_bytes(flow) == left:
                seconds = defaults.BULK_STALL_SECONDS
                self.flows.fail(flow, f"has sent nothing for {seconds:g} s")

        self.at(trio.current_time() + defaults.BULK_STALL_SECONDS, "stalls", give_up)

    # --- what transports ask ---

    def at(self, time: float, name: str, action: _Action) -> None:
        """Do something later; `name` says which link it belongs to, for ties."""
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        self.timeline.at(time, name, number, action)

    def find(self, peer: PeerId) -> SimulatedTransport | None:
        return self._here.get(peer)

    def neighbour(self, owner: PeerId, peer: PeerId) -> SimulatedTransport | None:
        """The other end of a connection, as far as its owner knows."""
        connection = self._connection(owner, peer)
        return connection.peer if connection is not None else None

    def at_host(self, host: str) -> SimulatedTransport | None:
        return self._by_host.get(host)

    def is_dark(self, host: str) -> bool:
        return host in self._gone_dark

    def is_cut(self, sender: BulkPlane, receiver: BulkPlane) -> bool:
        """Whether nothing passes from one to the other."""
        if not self._cuts and not self._gone_dark:
            return False
        return (
            (sender.peer_id, receiver.peer_id) in self._cuts
            or sender.host in self._gone_dark
            or receiver.host in self._gone_dark
        )

    def is_silent(self, a: BulkPlane, b: BulkPlane) -> bool:
        """Whether a question of one to the other stays without an answer."""
        return self.is_cut(a, b) or self.is_cut(b, a)

    def latency(self, a: str, b: str) -> float:
        """One-way seconds between two regions, without jitter; drawn once by seed."""
        if a == b:
            return self.weather.local_seconds
        pair = (min(a, b), max(a, b))
        if pair not in self._latencies:
            self._latencies[pair] = source(self.seed, "latency", *pair).uniform(
                *LATENCY_SECONDS_RANGE
            )
        return self._latencies[pair]

    def draw_latency(self, sender: BulkPlane, receiver: BulkPlane) -> float:
        """What one message takes from one to the other, retransmissions included."""
        self.messages += 1
        self.messages_by_sender[sender.peer_id] += 1
        name = f"{sender.peer_id}>{receiver.peer_id}"
        chance = self._chances.get(name)
        if chance is None:
            chance = self._chances[name] = source(self.seed, "link", name).random
        base = self.latency(sender.line.region, receiver.line.region)
        seconds = base * (1.0 + self.weather.jitter * chance())
        wait = RETRANSMISSION_SECONDS + 2 * base
        while chance() < self.weather.loss:
            seconds += wait
            wait *= 2
        return seconds

    def join(self, a: SimulatedTransport, b: SimulatedTransport) -> None:
        """A new connection of two peers."""
        near = _Connection(a, b, _Way(self, a, b))
        far = _Connection(b, a, _Way(self, b, a))
        near.twin, far.twin = far, near
        for connection in (near, far):
            connection.owner._connections[connection.peer.peer_id] = connection
            connection.owner._emit(ConnectionEvent(connection.peer.peer_id, connected=True))


class SimulatedTransport(BulkPlane):
    """`swarm.transport.Transport` on a `SimulatedNetwork`."""

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
        self._connections: dict[PeerId, _Connection] = {}

    def addresses(self) -> Sequence[str]:
        return (f"/ip4/{self.host}/tcp/{PORT}/p2p/{self.peer_id}",)

    def bulk_addresses(self) -> Sequence[str]:
        return (f"http://{self.host}:{PORT + 1}",)

    async def use_relay(self, address: str) -> None:
        """Everybody can be reached directly here, so there is nothing to relay."""
        await trio.lowlevel.checkpoint()
        raise ConnectError(f"{address} relays nothing in this simulation")

    def reachability(self) -> Reachability:
        return Reachability.PUBLIC

    # --- connections ---

    def connected(self) -> Sequence[PeerId]:
        return sorted(self._connections)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        if peer in self._connections:
            return
        if self._is_banned(peer):
            raise ConnectError(f"{peer} is banned here")
        reasons = []
        with trio.move_on_after(defaults.CONNECT_DEADLINE_SECONDS) as scope:
            for address in addresses[: defaults.DIAL_ADDRESSES_MAX]:
                reason = await self._dial(peer, address)
                if reason is None:
                    return
                reasons.append(f"{address}: {reason}")
        if scope.cancelled_caught:
            reasons.append(f"no answer within {defaults.CONNECT_DEADLINE_SECONDS:g} s")
        raise ConnectError(f"cannot connect to {peer}: {'; '.join(reasons) or 'no address known'}")

    async def _dial(self, peer: PeerId, address: str) -> str | None:
        """None when connected, else why not."""
        parts = address.split("/")
        if len(parts) < 5 or parts[1] != "ip4" or parts[3] != "tcp" or not parts[4].isdecimal():
            return "not a multiaddr with a TCP port"
        if len(parts) > 6 and parts[6] != peer:
            return "the address names another peer"
        network = self._network
        remote = network.at_host(parts[2]) if int(parts[4]) == PORT else None
        if network.is_dark(parts[2]) or (remote and network.is_silent(self, remote)):
            await trio.sleep(defaults.DIAL_DEADLINE_SECONDS)
            return f"no answer within {defaults.DIAL_DEADLINE_SECONDS:g} s"
        if remote is None:
            await trio.sleep(2 * network.weather.local_seconds)
            return "nobody answers"
        round_trip = network.draw_latency(self, remote) + network.draw_latency(remote, self)
        await trio.sleep(CONNECT_SECONDS + CONNECT_ROUND_TRIPS * round_trip)
        if self.gone or remote.gone or network.is_silent(self, remote):
            return "the connection was lost"
        if remote.peer_id != peer:
            return f"{remote.peer_id} answers there"
        if remote._is_banned(self.peer_id):
            return "the peer refuses the connection"
        if peer in self._connections or self.peer_id in remote._connections:
            return await self._meet(remote)
        if len(remote._connections) >= defaults.CONNECTIONS_MAX:
            return f"the peer has {defaults.CONNECTIONS_MAX} connections and takes no more"
        if len(self._connections) >= defaults.CONNECTIONS_MAX:
            return f"this peer has {defaults.CONNECTIONS_MAX} connections and opens no more"
        network.join(self, remote)
        return None

    async def _meet(self, remote: SimulatedTransport) -> str | None:
        """Both dialled at once, or one side has yet to hear that their last connection ended."""
        stale = remote._connections.get(self.peer_id)
        if remote.peer_id in self._connections:
            return None
        if stale is not None:
            stale.close("the connection was closed", tell=False)
        self._network.join(self, remote)
        return None

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        self._drop(peer)

    def ban(self, peer: PeerId, seconds: float) -> None:
        self._ban(peer, seconds)
        self._drop(peer)

    def _drop(self, peer: PeerId) -> None:
        self._forget_admission(peer)
        connection = self._connections.get(peer)
        if connection is not None:
            connection.close("the connection was closed")

    async def open_stream(
        self, peer: PeerId, protocol: str, framing: Framing = Framing.SWARM
    ) -> Stream:
        connection = self._connections.get(peer)
        if connection is None:
            await trio.lowlevel.checkpoint()
            raise StreamError(f"stream {protocol} with {peer}: not connected")
        with trio.move_on_after(defaults.STREAM_OPEN_DEADLINE_SECONDS):
            await self._round_trip(connection)
            if self._connections.get(peer) is not connection:
                raise StreamError(f"stream {protocol} with {peer}: the connection was lost")
            return self._start_stream(connection, protocol, framing)
        raise StreamError(
            f"stream {protocol} with {peer}: no answer within "
            f"{defaults.STREAM_OPEN_DEADLINE_SECONDS:g} s"
        )

    @staticmethod
    async def _round_trip(connection: _Connection) -> None:
        """Ask and be answered, in order with what is under way; or the connection ends."""
        twin = connection.twin
        assert twin is not None
        answered = trio.Event()
        connection.asking[answered] = None
        connection.way_out.send(32, lambda: twin.way_out.send(32, answered.set))
        try:
            await answered.wait()
        finally:
            del connection.asking[answered]

    def _start_stream(self, connection: _Connection, protocol: str, framing: Framing) -> Stream:
        remote = connection.peer
        if remote.gone:  # it answered, and died before it was asked for more
            raise StreamError(f"stream {protocol} with {remote.peer_id}: the connection was lost")
        if protocol not in remote._handlers:
            raise StreamError(
                f"stream {protocol} with {remote.peer_id}: the peer does not speak it"
            )
        near, far = connection.new_stream()
        stream = self._opened_stream(near, remote.peer_id, protocol, framing)
        handler = remote._admit_stream(self.peer_id, protocol)
        if handler is None:
            far.break_("refused")
            near.break_("reset by the other side")
        else:
            remote._nursery.start_soon(
                remote._serve_stream,
                far,
                self.peer_id,
                protocol,
                handler,
                name=f"serve {protocol} {self.peer_id}",
            )
        return stream
