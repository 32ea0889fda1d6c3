"""A network in virtual time: regions, latency, loss, slow lines, cuts and sudden deaths.

Connections begin and end as in libp2p: connecting takes 250 ms and five round trips. Other peers
notice a process's death at once, but lost power or a cut only when a ping stays unanswered (25 s).
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from simnet.bulk import BulkPlane
from simnet.clock import Timeline, source
from simnet.flows import Flow, Flows
from simnet.lines import LATENCY_SECONDS_RANGE, Line, Weather, can_punch
from simnet.links import SILENCE_SECONDS, Connection, Endpoint, link_seed, mix, travel_seconds
from simnet.transport import SimulatedTransport
from swarm.transport import ConnectionEvent
from swarm.transport.http import limits as http_limits
from swarm.wire.identity import Identity, PeerId
from swarm.world import Disk, World

PUNCH_ROUND_TRIPS = 3
"""DCUtR over the relay: CONNECT both ways, SYNC, then both dial at once."""

_Action = Callable[[], None]


class SimulatedNetwork:
    """The peers, their links and faults. Use it inside `async with network.running():`."""

    def __init__(self, seed: int = 0, weather: Weather | None = None) -> None:
        self.seed = seed
        self.weather = weather or Weather()
        self.timeline = Timeline()
        self.flows = Flows(self.timeline)
        self.messages = 0
        """Control messages sent so far."""
        self.bytes_sent = 0
        """Bytes of messages on connections so far."""
        self.messages_by_sender: Counter[PeerId] = Counter()
        self.bytes_by_sender: Counter[PeerId] = Counter()
        self.bytes_by_receiver: Counter[PeerId] = Counter()
        self.connections_made = 0
        self.link_seed = link_seed(seed)
        self._numbers: dict[str, int] = {}
        self._hosts: dict[PeerId, int] = {}
        """Host numbers by peer: a peer keeps its address when it comes back."""
        self._here: dict[PeerId, SimulatedTransport] = {}
        self._by_host: dict[str, SimulatedTransport] = {}
        self._gone_dark: dict[str, None] = {}
        """Hosts that lost power: no machine there refuses a connection."""
        self._latencies: dict[tuple[str, str], float] = {}
        self._cuts: Counter[tuple[PeerId, PeerId]] = Counter()
        self._frozen: Counter[PeerId] = Counter()
        self._losses: dict[PeerId, float] = {}
        self._duplicated: Counter[tuple[PeerId, str]] = Counter()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.timeline.run, name="simulated network")
            yield
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def transport(
        self,
        identity: Identity,
        *,
        world: World,
        disk: Disk,
        line: Line | None = None,
        relay: bool = False,
        host: str | None = None,
    ) -> AsyncIterator[SimulatedTransport]:
        """Open a peer's transport; leaving the block kills its process. `relay`: whether it carries
        connections of peers behind NAT. `host`: a unique IPv4 address."""
        if identity.peer_id in self._here:
            raise ValueError(f"{identity.peer_id} is on this network already")
        number = self._hosts.setdefault(identity.peer_id, len(self._hosts))
        # Each peer has a /24 of its own, so that the DHT's bound per /24 does not limit them.
        host = host or f"{11 + (number >> 16)}.{number >> 8 & 255}.{number & 255}.1"
        async with trio.open_nursery() as nursery:
            transport = SimulatedTransport(
                self, identity, host, line or Line(), world=world, disk=disk, nursery=nursery
            )
            transport.relay = relay
            self._here[identity.peer_id] = self._by_host[host] = transport
            self._gone_dark.pop(host, None)
            nursery.start_soon(transport.keep_few, name=f"trim {identity.peer_id}")
            try:
                yield transport
            finally:
                if self._here.get(identity.peer_id) is transport:
                    self.kill(identity.peer_id)
                transport._close_subscriptions()
                nursery.cancel_scope.cancel()

    # --- faults ---

    def cut(self, a: PeerId, b: PeerId, *, one_way: bool = False) -> None:
        """Let nothing pass from `a` to `b` (nor back, unless `one_way`); neither is notified."""
        self._cuts.update([(a, b)] if one_way else [(a, b), (b, a)])
        self._fall_silent(a, b)

    def heal(self, a: PeerId, b: PeerId, *, one_way: bool = False) -> None:
        self._cuts -= Counter([(a, b)] if one_way else [(a, b), (b, a)])  # drops zeros
        self._speak_again(a, b)

    def freeze(self, peer: PeerId) -> None:
        """Let nothing pass to or from a peer, also for peers that join meanwhile."""
        self._frozen[peer] += 1
        for other in self._neighbours_of(peer):
            self._fall_silent(peer, other)

    def thaw(self, peer: PeerId) -> None:
        self._frozen -= Counter([peer])  # drops zeros
        if peer in self._frozen:
            return
        for other in self._neighbours_of(peer):
            self._speak_again(peer, other)

    def lose(self, peer: PeerId, share: float) -> None:
        """Lose a further share of a peer's packets, in each direction; a negative one undoes it."""
        left = self._losses.pop(peer, 0.0) + share
        if left > 1e-9:
            self._losses[peer] = left

    def loss(self, sender: PeerId, receiver: PeerId) -> float:
        """Share of packets lost from sender to receiver."""
        if not self._losses:
            return self.weather.loss
        more = self._losses.get(sender, 0.0) + self._losses.get(receiver, 0.0)
        return min(0.95, self.weather.loss + more)

    def narrow(self, peer: PeerId, bytes_per_second: float) -> None:
        """Give a peer's line another speed in both directions, until the peer leaves."""
        end, speed = self._here[peer], bytes_per_second
        end.line = dataclasses.replace(
            end.line, uplink_bytes_per_second=speed, downlink_bytes_per_second=speed
        )
        for link in (end.uplink, end.downlink):
            self.flows.widen(link, speed)

    def duplicate(self, peer: PeerId, protocol: str, times: int) -> None:
        """Make every frame of a protocol reach a peer `times` more times; negative: undo it."""
        self._duplicated[(peer, protocol)] += times
        self._duplicated = +self._duplicated  # drops zeros

    def duplicates(self, peer: PeerId, protocol: str) -> int:
        """Number of extra arrivals of each frame of a protocol to a peer."""
        return self._duplicated[(peer, protocol)] if self._duplicated else 0

    def _neighbours_of(self, peer: PeerId) -> list[PeerId]:
        transport = self._here.get(peer)
        if transport is None:
            return []
        ends = [end for pair in transport._transfers.values() for end in pair if end != peer]
        return list(dict.fromkeys([*transport.connected(), *ends]))

    def _fall_silent(self, a: PeerId, b: PeerId) -> None:
        self._lose_later(a, b)
        for flow in self._flows_between(a, b):
            self.stall(flow)

    def _speak_again(self, a: PeerId, b: PeerId) -> None:
        for sender, receiver in ((a, b), (b, a)):
            connection = self._connection(sender, receiver)
            if connection is not None:
                connection.flow_again()
        here = [self._here.get(peer) for peer in (a, b)]
        if here[0] and here[1] and not self.is_silent(here[0], here[1]):
            for flow in self._flows_between(a, b):
                self.flows.resume(flow)

    def kill(self, peer: PeerId) -> None:
        transport = self._here.get(peer)
        if transport is None:
            return
        for connection in list(transport.connections.values()):
            connection.close("the connection was lost")
        self._remove(transport)

    def cut_power(self, peer: PeerId) -> None:
        """Cut a machine's power, without notice. Its transport moves nothing from now on."""
        transport = self._here.get(peer)
        if transport is None:
            return
        self._gone_dark[transport.host] = None
        self._remove(transport)
        for connection in list(transport.connections.values()):
            connection.closed = True
            # Its own side ends now; the other side notices when a ping stays unanswered.
            connection.close("the machine has lost power", tell=False)
            connection.twin.closed = True
            self.at(
                trio.current_time() + SILENCE_SECONDS,
                f"{peer}>{connection.peer.peer_id}",
                connection.twin.lose,
            )

    def _remove(self, transport: SimulatedTransport) -> None:
        transport.gone = True
        del self._here[transport.peer_id]
        del self._by_host[transport.host]
        for connection in list(transport.carried):
            if connection.owner.connections.get(connection.peer.peer_id) is connection:
                connection.close("the relay was lost")
        transport.carried.clear()
        for flow in list(transport._transfers):
            if transport.host in self._gone_dark:
                self.stall(flow)
            else:
                self.flows.fail(flow, "broke off")

    def _lose_later(self, a: PeerId, b: PeerId) -> None:
        """End connections of two peers after a while of cut pings, which need both directions."""
        for sender, receiver in ((a, b), (b, a)):
            connection = self._connection(sender, receiver)
            if connection is not None:
                self.at(
                    trio.current_time() + SILENCE_SECONDS,
                    f"{sender}>{receiver}",
                    functools.partial(self._lose_if_cut, connection),
                )

    def _lose_if_cut(self, connection: Connection) -> None:
        if self.is_silent(connection.owner, connection.peer):
            connection.lose()

    def _connection(self, owner: PeerId, peer: PeerId) -> Connection | None:
        transport = self._here.get(owner)
        return transport.connections.get(peer) if transport is not None else None

    def _flows_between(self, a: PeerId, b: PeerId) -> list[Flow]:
        transport = self._here.get(a)
        if transport is None:
            return []
        return [flow for flow, ends in transport._transfers.items() if b in ends]

    def stall(self, flow: Flow) -> None:
        """Stall a transfer; its receiver gives up if that lasts."""
        self.flows.pause(flow)
        left = self.flows.left_bytes(flow)

        def give_up() -> None:
            if self.flows.left_bytes(flow) == left:
                self.flows.fail(flow, f"has sent nothing for {http_limits.STALL_SECONDS:g} s")

        self.at(trio.current_time() + http_limits.STALL_SECONDS, "stalls", give_up)

    # --- what transports ask ---

    def at(self, time: float, name: str, action: _Action) -> None:
        """Run an action later; `name` is its link or purpose, which orders ties."""
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        self.timeline.at(time, name, number, action)

    def neighbour(self, owner: PeerId, peer: PeerId) -> tuple[Endpoint, Endpoint | None] | None:
        """The other end of a connection and the relay in between, as far as its owner knows."""
        connection = self._connection(owner, peer)
        return (connection.peer, connection.via) if connection is not None else None

    def path_latency(self, a: BulkPlane, via: BulkPlane | None, b: BulkPlane) -> float:
        """One-way latency in seconds, without jitter, directly or over a relay."""
        if via is None:
            return self.latency(a.line.region, b.line.region)
        return self.latency(a.line.region, via.line.region) + self.latency(
            via.line.region, b.line.region
        )

    def at_host(self, host: str) -> SimulatedTransport | None:
        return self._by_host.get(host)

    def is_dark(self, host: str) -> bool:
        return host in self._gone_dark

    def is_cut(self, sender: BulkPlane, receiver: BulkPlane) -> bool:
        """Whether nothing passes from sender to receiver."""
        if not self._cuts and not self._gone_dark and not self._frozen:
            return False
        return (
            (sender.peer_id, receiver.peer_id) in self._cuts
            or sender.peer_id in self._frozen
            or receiver.peer_id in self._frozen
            or sender.host in self._gone_dark
            or receiver.host in self._gone_dark
        )

    def is_silent(self, a: BulkPlane, b: BulkPlane) -> bool:
        """Whether a request of one to the other stays unanswered."""
        return self.is_cut(a, b) or self.is_cut(b, a)

    def latency(self, a: str, b: str) -> float:
        """One-way latency in seconds between two regions, without jitter; drawn once by seed."""
        if a == b:
            return self.weather.local_seconds
        pair = (min(a, b), max(a, b))
        if pair not in self._latencies:
            self._latencies[pair] = source(self.seed, "latency", *pair).uniform(
                *LATENCY_SECONDS_RANGE
            )
        return self._latencies[pair]

    def link(self, sender: BulkPlane, receiver: BulkPlane) -> int:
        return self._hosts[sender.peer_id] << 32 | self._hosts[receiver.peer_id]

    def draw_latency(self, sender: BulkPlane, receiver: BulkPlane) -> float:
        """Latency of one message outside connections, by a hash of link and time."""
        self.count_message(sender.peer_id)
        base = self.latency(sender.line.region, receiver.line.region)
        draw = mix(self.link_seed ^ mix(~self.link(sender, receiver)) ^ hash(trio.current_time()))
        loss = self.loss(sender.peer_id, receiver.peer_id)
        return travel_seconds(base, self.weather.jitter, loss, draw)

    def count_message(self, sender: PeerId) -> None:
        self.messages += 1
        self.messages_by_sender[sender] += 1

    def join(self, a: Endpoint, b: Endpoint, via: Endpoint | None = None) -> None:
        """Connect two peers, directly or over a relay."""
        self.connections_made += 1
        near, far = Connection(self, a, b, via), Connection(self, b, a, via)
        near.twin, far.twin = far, near
        for connection in (near, far):
            connection.owner.remember(connection)
            connection.owner._emit(
                ConnectionEvent(connection.peer.peer_id, connected=True, relayed=via is not None)
            )
        if via is not None:
            via.carried[near] = None
            seconds = PUNCH_ROUND_TRIPS * 2 * self.path_latency(a, via, b)
            self.at(
                trio.current_time() + seconds,
                f"punch {a.peer_id}>{b.peer_id}",
                functools.partial(self._punch, near),
            )

    def _punch(self, connection: Connection) -> None:
        """Make a relayed connection direct, where the peers' NATs allow it."""
        owner, peer, via = connection.owner, connection.peer, connection.via
        if via is None or owner.connections.get(peer.peer_id) is not connection:
            return
        if self.is_silent(owner, peer) or not can_punch(owner.line, peer.line):
            return
        via.carried.pop(connection, None)
        for side in (connection, connection.twin):
            side.make_direct()
            side.owner._emit(ConnectionEvent(side.peer.peer_id, connected=True, relayed=False))
