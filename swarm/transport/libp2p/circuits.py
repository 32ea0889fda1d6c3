"""A relay, with limits that it names when reached. libp2p's own (0.8.1) ends circuits with any
other of their peer, has no limit on its whole rate, and writes reasons into the carried stream."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeerId
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP_PROTOCOL
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg

from swarm.events import Events, Rationed
from swarm.transport import limits
from swarm.transport.libp2p.connections import TamedSwarm
from swarm.transport.libp2p.guard import BROKEN
from swarm.transport.libp2p.relays import Reservations
from swarm.transport.rates import TokenBucket
from swarm.transport.room import Held

ANSWER_SECONDS = 15.0
"""From a peer's wish for a circuit to the other peer's consent."""

READ_BYTES = 64 * 1024

RESERVATION_SECONDS = 3600
"""Lifetime of a reservation; its peer renews it after half of that."""

STRANGERS_SHARE = 4
"""Strangers of one public /24 (IPv6: /48) have at most one in so many of a peer's circuits."""

RATE_BURST_SECONDS = 0.5
"""What a relay may carry at once, in seconds of its rate."""


@dataclass(frozen=True)
class CircuitLimits:
    """How much a relay carries."""

    circuit_bytes: int = 1024 * 10**6
    """Bytes of one circuit, both ways: control traffic and pieces now and then, no checkpoints."""
    circuit_seconds: int = 3600
    """Lifetime of a circuit; its peers open another one."""
    circuits_per_peer: int = 32
    """Circuits to and from one peer at once."""
    reservations: int = limits.RELAY_RESERVATIONS_MAX
    """Peers behind NAT that the relay serves at once."""
    bytes_per_second: float | None = None
    """Bytes carried by all circuits together; None: no limit."""


@dataclass(frozen=True, eq=False)
class Circuit:
    """A circuit, from the wish for it to its end."""

    source: ID
    target: ID
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Circuits(CircuitV2Protocol):  # type: ignore[misc]
    """The relay of a host, if `allow_hop`, and the receiving end of circuits."""

    def __init__(
        self, host: Any, given: CircuitLimits, events: Events | None, *, allow_hop: bool
    ) -> None:
        own = RelayLimits(
            duration=given.circuit_seconds,
            data=given.circuit_bytes,
            max_circuit_conns=given.circuits_per_peer,
            max_reservations=given.reservations,
            reservation_ttl=RESERVATION_SECONDS,
        )
        super().__init__(host, own, allow_hop=allow_hop)
        swarm: TamedSwarm = host.get_network()
        self._connection_of: Callable[[ID], Held | None] = lambda peer: next(
            iter(swarm.connections.get(peer, ())), None
        )
        self.resource_manager = Reservations(own, host, self._connection_of)
        self._given = given
        self._open: dict[Circuit, None] = {}
        """The oldest first."""
        self._events = Rationed(events) if events is not None else None
        rate = given.bytes_per_second
        self._rate = rate and TokenBucket(rate, rate * RATE_BURST_SECONDS)

    async def _handle_reserve(self, stream: Any, message: HopMessage) -> None:
        """Reserve for the asker only; libp2p's own lets a peer reserve in another's name."""
        if message.peer.id and ID(message.peer.id) != stream.muxed_conn.peer_id:
            await self._send_status(stream, StatusCode.PERMISSION_DENIED, "another's name")
            return
        await super()._handle_reserve(stream, message)

    async def _handle_connect(self, stream: Any, message: HopMessage) -> None:
        """Connect the asker to a peer with a reservation, and carry until a limit is reached."""
        source: ID = stream.muxed_conn.peer_id
        target = ID(message.peer.id)
        refused = self._refusal(source, target)
        if refused is not None:
            await self._send_status(stream, *refused)
            await stream.close()
            return
        with self._opened(source, target) as circuit:
            with circuit.scope:
                await self._connect(stream, source, target)
            if circuit.scope.cancelled_caught:
                await stream.reset()

    async def _connect(self, stream: Any, source: ID, target: ID) -> None:
        onward = await self._consent(source, target)
        if onward is None:
            await self._send_status(stream, StatusCode.CONNECTION_FAILED, "no answer")
            await stream.close()
            return
        await self._send_status(stream, StatusCode.OK, "", limit=self._limit)
        try:
            if reached := await self.carry(stream, onward):
                self._tell(reached)
        finally:
            with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
                for each in (stream, onward):
                    with contextlib.suppress(*BROKEN):
                        await each.reset()

    @property
    def _limit(self) -> Limit:
        return Limit(duration=self._given.circuit_seconds, data=self._given.circuit_bytes)

    def serves(self, peer: ID) -> bool:
        """Whether a peer has a reservation here."""
        return self.resource_manager.get_reservation(peer) is not None

    def _refusal(self, source: ID, target: ID) -> tuple[StatusCode, str] | None:
        if self.resource_manager.get_reservation(target) is None:
            return StatusCode.NO_RESERVATION, "the peer has no reservation here"
        if self._is_full(source) or not self._has_room(source, target):
            self._tell("circuits per peer")
            return StatusCode.RESOURCE_LIMIT_EXCEEDED, "the peer has too many circuits"
        return None

    def _is_full(self, peer: ID) -> bool:
        own = sum(peer in (circuit.source, circuit.target) for circuit in self._open)
        return own >= self._given.circuits_per_peer

    def _has_room(self, source: ID, target: ID) -> bool:
        """Whether there is room for one more circuit, as with reservations: an admitted source
        displaces a stranger, and one address range's strangers have at most a share."""
        newcomer = self._connection_of(source)
        if newcomer is None:
            return False
        strangers: dict[Circuit, Held] = {}
        for circuit in self._open:
            held = self._connection_of(circuit.source)
            if circuit.target == target and held is not None and not held.vouched:
                strangers[circuit] = held
        if not newcomer.vouched:
            range_ = newcomer.origin.public_range
            near = sum(held.origin.public_range == range_ for held in strangers.values())
            most = max(1, self._given.circuits_per_peer // STRANGERS_SHARE)
            return not (range_ and near >= most) and not self._is_full(target)
        if self._is_full(target):
            if not strangers:
                return False
            next(iter(strangers)).scope.cancel()
        return True

    @contextmanager
    def _opened(self, source: ID, target: ID) -> Iterator[Circuit]:
        circuit = Circuit(source, target)
        self._open[circuit] = None
        try:
            yield circuit
        finally:
            del self._open[circuit]

    async def _consent(self, source: ID, target: ID) -> Any | None:
        """A stream to the target, which agreed to a circuit from the source; None if it did not."""
        wish = StopMessage(
            type=StopMessage.CONNECT, peer=CircuitPeerId(id=source.to_bytes()), limit=self._limit
        )
        stream = None
        try:
            with trio.move_on_after(ANSWER_SECONDS):
                stream = await self.host.new_stream(target, [STOP_PROTOCOL])
                await write_delimited_msg(stream, wish)
                if (await read_delimited_msg(stream, StopMessage)).status == StatusCode.OK:
                    agreed, stream = stream, None
                    return agreed
        except Exception as error:  # protobuf's, varint's and the stream's errors alike
            self._network.guard.tell("circuit", str(target), str(error))
        finally:
            if stream is not None:
                with trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True):
                    await stream.reset()
        return None

    @property
    def _network(self) -> TamedSwarm:
        swarm: TamedSwarm = self.host.get_network()
        return swarm

    async def carry(self, stream: Any, onward: Any) -> str:
        """Carry bytes both ways until one side ends; returns the limit that was reached, if any."""
        left = self._given.circuit_bytes
        reached = ""

        async def pump(source: Any, sink: Any) -> None:
            nonlocal left, reached
            with contextlib.suppress(*BROKEN):
                while data := await source.read(READ_BYTES):
                    left -= len(data)
                    if left < 0:
                        reached = "bytes"
                        break
                    if self._rate:
                        await self._rate.spend(len(data))
                    with trio.move_on_after(limits.STREAM_SEND_DEADLINE_SECONDS) as scope:
                        await sink.write(data)
                    if scope.cancelled_caught:
                        break  # nobody reads
            nursery.cancel_scope.cancel()

        with trio.move_on_after(self._given.circuit_seconds) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pump, stream, onward)
                nursery.start_soon(pump, onward, stream)
        return "time" if scope.cancelled_caught else reached

    def _tell(self, limit: str) -> None:
        if self._events is not None:
            self._events.emit("relay.limit_reached", limit=limit)
