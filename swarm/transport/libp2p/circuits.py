"""Reservations of a relay, with libp2p's defects repaired (circuit relay v2, libp2p 0.8.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.resources import RelayLimits, RelayResourceManager
from libp2p.relay.circuit_v2.utils import write_delimited_msg

from swarm.transport.libp2p.connections import TamedSwarm
from swarm.transport.room import Held

RELAY_STRANGERS_PER_RANGE_MAX = 16
"""Reservations of peers of one public /24 (IPv6: /48) that are not admitted (yet)."""


class Circuits(CircuitV2Protocol):  # type: ignore[misc]
    """libp2p's relay, with slots for admitted peers. libp2p's own lets any peer reserve in another
    peer's name, and lets strangers take every slot."""

    def __init__(self, host: Any, limits: RelayLimits, *, allow_hop: bool) -> None:
        super().__init__(host, limits, allow_hop=allow_hop)
        swarm: TamedSwarm = host.get_network()
        self.resource_manager = Reservations(
            limits, host, lambda peer: next(iter(swarm.connections.get(peer, ())), None)
        )

    async def _handle_reserve(self, stream: Any, message: HopMessage) -> None:
        if message.peer.id and ID(message.peer.id) != stream.muxed_conn.peer_id:
            denial = HopMessage(type=HopMessage.STATUS, status=StatusCode.PERMISSION_DENIED)
            await write_delimited_msg(stream, denial)
            return
        await super()._handle_reserve(stream, message)


class Reservations(RelayResourceManager):  # type: ignore[misc]
    """The reservations of connected peers.

    When all slots are taken, an admitted peer takes a stranger's. Strangers of one address range
    have at most `RELAY_STRANGERS_PER_RANGE_MAX`.
    """

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
