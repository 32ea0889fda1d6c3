"""Circuit relay v2: this peer as the client of relays, and the reservations of a relay."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import trio
from libp2p.abc import INetStream
from libp2p.network.connection.raw_connection import ConnectionType, RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeerId
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP_PROTOCOL
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.resources import RelayLimits, RelayResourceManager
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from multiaddr import Multiaddr

from swarm.transport import ConnectError, StreamError, Transport, limits
from swarm.transport.libp2p.addresses import CIRCUIT, require_peer
from swarm.transport.libp2p.connections import Host
from swarm.transport.room import Held
from swarm.wire.identity import PeerId

log = logging.getLogger(__name__)

LIFETIME_SECONDS = 600.0, 3600.0
"""Bounds of a reservation's lifetime, whatever the relay says: it names a time of day, which it may
invent, and one of the two clocks may be wrong."""


class Relays:
    """This peer's reservations at relays, and its circuits to other peers."""

    def __init__(self, host: Host, transport: Transport) -> None:
        self._host = host
        self._transport = transport
        self._held: dict[PeerId, list[str]] = {}
        """Relays that hold a reservation for this peer, with the addresses given to `use_relay`."""

    def addresses(self) -> list[str]:
        """Addresses of the relays that hold a reservation for this peer now."""
        return [address for addresses in self._held.values() for address in addresses]

    def holds(self, relay: PeerId) -> bool:
        return relay in self._held

    async def keep_reservation(self, relay: PeerId, addresses: Sequence[str]) -> None:
        """Renew a reservation at half its lifetime, and after the relay was lost."""
        while True:
            asked_at = trio.current_time()
            try:
                lifetime = await self.reserve(relay, addresses)
            except (ConnectError, StreamError) as error:
                log.info("relay %s: %s", relay, error)
                self._held.pop(relay, None)
                await trio.sleep(limits.RELAY_RETRY_SECONDS)
                continue
            with (
                self._transport.connection_events() as events,
                trio.move_on_at(asked_at + lifetime / 2) as due,
            ):
                if relay in self._transport.connected():
                    async for _ in events:
                        if relay not in self._transport.connected():
                            break
                    else:
                        return  # this peer is closing
            if not due.cancelled_caught:
                self._held.pop(relay, None)
                # One that hangs up after each answer is not asked again at once.
                await trio.sleep_until(asked_at + limits.RELAY_RETRY_SECONDS)

    async def reserve(self, relay: PeerId, addresses: Sequence[str]) -> float:
        """Ask for a reservation; returns its lifetime, within `LIFETIME_SECONDS`."""
        await self._transport.connect(relay, addresses)
        stream, reply = await self._ask_relay(relay, HopMessage(type=HopMessage.RESERVE))
        await stream.reset()
        if reply.status != StatusCode.OK:
            raise ConnectError(f"relay {relay} declines: {_status_name(reply.status)}")
        self._held[relay] = list(addresses)
        shortest, longest = LIFETIME_SECONDS
        return min(max(reply.reservation.expire - time.time(), shortest), longest)

    async def dial(self, peer: PeerId, texts: Sequence[str]) -> None:
        """Open a circuit to a peer, by its addresses that are the same relay's."""
        addresses = [text.partition(CIRCUIT)[0] for text in texts]
        _, relay = require_peer(addresses[0])
        await self._transport.connect(relay, addresses)
        request = HopMessage(
            type=HopMessage.CONNECT, peer=CircuitPeerId(id=ID.from_string(peer).to_bytes())
        )
        stream, reply = await self._ask_relay(relay, request)
        if reply.status != StatusCode.OK:
            await stream.reset()
            raise ConnectError(f"relay {relay} declines: {_status_name(reply.status)}")
        connection = RawConnection(
            stream,
            initiator=True,
            connection_type=ConnectionType.RELAYED,
            addresses=[Multiaddr(texts[0])],
        )
        await self._host.upgrade_outbound_connection(connection, ID.from_string(peer))

    async def _ask_relay(self, relay: PeerId, request: HopMessage) -> tuple[INetStream, HopMessage]:
        with trio.move_on_after(limits.DIAL_DEADLINE_SECONDS):
            try:
                stream = await self._host.new_stream(ID.from_string(relay), [HOP_PROTOCOL])
                await write_delimited_msg(stream, request)
                return stream, await read_delimited_msg(stream, HopMessage)
            except Exception as error:  # protobuf's, varint's and the stream's errors alike
                raise ConnectError(f"relay {relay} does not answer: {error}") from error
        raise ConnectError(
            f"relay {relay} has not answered within {limits.DIAL_DEADLINE_SECONDS:g} s"
        )


def _status_name(status: int) -> str:
    try:
        name: str = StatusCode(status).name
        return name.lower().replace("_", " ")
    except ValueError:
        return f"status {status}"


RELAY_STRANGERS_PER_RANGE_MAX = 16
"""Reservations of peers of one public /24 (IPv6: /48) that are not admitted (yet)."""


class Reservations(RelayResourceManager):  # type: ignore[misc]
    """Connected peers' reservations. If all are taken, an admitted peer takes a stranger's; one
    address range's strangers have at most `RELAY_STRANGERS_PER_RANGE_MAX`."""

    def __init__(
        self, limits: RelayLimits, host: Any, connection_of: Callable[[ID], Held | None]
    ) -> None:
        super().__init__(limits, host)
        self._connection_of = connection_of

    def can_accept_reservation(self, peer_id: ID) -> bool:
        """Whether a peer may reserve; frees a slot for it where the rules allow that."""
        newcomer = self._connection_of(peer_id)
        if newcomer is None:
            return False
        strangers: dict[ID, Held] = {}
        for peer in list(self._reservations):
            connection = self._connection_of(peer)
            if connection is None:
                del self._reservations[peer]
            elif not connection.vouched and peer != peer_id:
                strangers[peer] = connection
        if newcomer.vouched:
            if strangers and not super().can_accept_reservation(peer_id):
                del self._reservations[next(iter(strangers))]
        else:
            range_ = newcomer.origin.public_range
            near = sum(other.origin.public_range == range_ for other in strangers.values())
            if range_ and near >= RELAY_STRANGERS_PER_RANGE_MAX:
                return False
        return bool(super().can_accept_reservation(peer_id))
