"""The client of relays (circuit relay v2): reservations for this peer, circuits to others."""

from __future__ import annotations

import logging
import time

import trio
from libp2p.abc import INetStream
from libp2p.network.connection.raw_connection import ConnectionType, RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeerId
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP_PROTOCOL
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from multiaddr import Multiaddr

from swarm.identity import PeerId
from swarm.transport import ConnectError, StreamError, Transport, limits
from swarm.transport.libp2p.addresses import require_peer
from swarm.transport.libp2p.connections import Host

log = logging.getLogger(__name__)


class Relays:
    """This peer's reservations at relays, and its circuits to other peers."""

    def __init__(self, host: Host, transport: Transport) -> None:
        self._host = host
        self._transport = transport
        self._held: dict[str, Multiaddr] = {}
        """Relays that hold a reservation for this peer, by the address given to `use_relay`."""

    def addresses(self) -> list[Multiaddr]:
        """Addresses of the relays that hold a reservation for this peer now."""
        return list(self._held.values())

    async def keep_reservation(self, text: str) -> None:
        """Renew a reservation at half its lifetime, and after the relay was lost."""
        _, relay = require_peer(text)
        while True:
            try:
                expires = await self.reserve(text)
            except (ConnectError, StreamError) as error:
                log.info("relay %s: %s", relay, error)
                self._held.pop(text, None)
                await trio.sleep(limits.RELAY_RETRY_SECONDS)
                continue
            renew_at = trio.current_time() + max(expires - time.time(), 0.0) / 2
            with self._transport.connection_events() as events, trio.move_on_at(renew_at):
                if relay in self._transport.connected():
                    async for _ in events:
                        if relay not in self._transport.connected():
                            break
                    else:
                        return  # this peer is closing
                self._held.pop(text, None)

    async def reserve(self, text: str) -> float:
        """Ask for a reservation; returns when it expires (seconds since the epoch)."""
        address, relay = require_peer(text)
        await self._transport.connect(relay, [text])
        stream, reply = await self._ask_relay(relay, HopMessage(type=HopMessage.RESERVE))
        await stream.reset()
        if reply.status != StatusCode.OK:
            raise ConnectError(f"relay {relay} declines: {_status_name(reply.status)}")
        self._held[text] = address
        return float(reply.reservation.expire)

    async def dial(self, peer: PeerId, text: str) -> None:
        relay_text = text.partition("/p2p-circuit")[0]
        _, relay = require_peer(relay_text)
        await self._transport.connect(relay, [relay_text])
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
            addresses=[Multiaddr(text)],
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
