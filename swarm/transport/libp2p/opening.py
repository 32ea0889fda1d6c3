"""Construction of a libp2p host with its defects repaired, and of a transport on it.

Names are looked up in threads of their own: a silent DNS server holds one for half a minute, so
that a few dozen names announced by strangers would stop the disk, in trio's common threads."""

import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from swarm.errors import UserError
from swarm.events import Events
from swarm.transport import limits
from swarm.transport.http.pace import Uplink
from swarm.transport.libp2p.addresses import (
    Announced,
    check_port_free,
    host_and_port,
    parse_multiaddr,
)
from swarm.transport.libp2p.circuits import CircuitLimits, Circuits
from swarm.transport.libp2p.connections import Host, TamedSwarm, TamedTCP, Upgrader
from swarm.transport.libp2p.guard import Guard
from swarm.transport.libp2p.transport import Libp2pTransport
from swarm.wire.identity import Identity
from swarm.world import Disk, World

LOOKUPS_MAX = 32
"""Lookups at once; further ones wait, for as long as their dial may take."""


class Lookups(trio.abc.HostnameResolver):
    """Looks names up as the system does."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(LOOKUPS_MAX)

    async def getaddrinfo(self, *given: Any) -> Any:
        """See `socket.getaddrinfo`."""
        return await self._run(socket.getaddrinfo, *given)

    async def getnameinfo(self, *given: Any) -> Any:
        """See `socket.getnameinfo`."""
        return await self._run(socket.getnameinfo, *given)

    async def _run(self, function: Any, *given: Any) -> Any:
        return await trio.to_thread.run_sync(
            function, *given, limiter=self._threads, abandon_on_cancel=True
        )


HANDSHAKE_SECONDS = 10.0
"""From accepting a connection until its peer has proved its identity: four round trips."""

NO_LIMIT = 1 << 30


@asynccontextmanager
async def open_libp2p(
    identity: Identity,
    listen: Sequence[str] = (),
    *,
    world: World,
    disk: Disk,
    events: Events | None = None,
    relay: bool = False,
    bulk_port: int = 0,
    uplink_bytes_per_second: float | None = None,
    announced: Announced | None = None,
    circuit_limits: CircuitLimits | None = None,
) -> AsyncIterator[Libp2pTransport]:
    """The transport of a peer on the real network, until the block ends.

    `listen`: TCP multiaddrs; none for a peer that only dials. `events`: receives contained faults
    of strangers. `relay`: carry connections for peers behind NAT. `bulk_port`: the port of HTTP, on
    the same interfaces (0: any). `uplink_bytes_per_second`: a limit on all blobs sent.
    `announced`: addresses beside or instead of the detected ones. `circuit_limits`: how much a
    relay carries.
    Raises `UserError` for a malformed address or a port in use."""
    addresses = _listen_addresses(listen, bulk_port)
    # Any stranger can cause the errors that libp2p logs: `Guard` reports those events instead.
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    trio.socket.set_custom_hostname_resolver(Lookups())
    tcp = TamedTCP()
    swarm = _swarm(identity, tcp, Guard(events))
    host = Host(swarm)
    circuits = Circuits(host, circuit_limits or CircuitLimits(), events, allow_hop=relay)
    async with host.run(addresses):
        if len(swarm.listeners) < len(addresses):
            raise UserError(f"cannot listen on {', '.join(listen)}; choose another with --listen")
        async with (
            background_trio_service(circuits),
            background_trio_service(host.punching),
            trio.open_nursery() as nursery,
        ):
            uplink = Uplink(uplink_bytes_per_second)
            transport = Libp2pTransport(
                identity,
                host,
                uplink,
                announced or Announced(),
                world=world,
                disk=disk,
                nursery=nursery,
            )
            try:
                await transport.listen_http(addresses, bulk_port)
                swarm.needs = lambda peer: circuits.serves(peer) or transport.is_served_by(peer)
                nursery.start_soon(transport.trim)
                if addresses:
                    nursery.start_soon(transport.reach.run)
                yield transport
            finally:
                with trio.move_on_after(limits.CLOSE_SECONDS, shield=True):
                    await transport.close()
                tcp.close_sockets()
                nursery.cancel_scope.cancel()


def _listen_addresses(listen: Sequence[str], bulk_port: int) -> list[Multiaddr]:
    """The addresses to listen on, all of them free; raises `UserError`."""
    addresses = []
    for text in listen:
        address, _ = parse_multiaddr(text)
        host, port = host_and_port(address)
        check_port_free(host, port)
        if bulk_port:
            check_port_free(host, bulk_port)
        addresses.append(address)
    return addresses


def _swarm(identity: Identity, tcp: TamedTCP, guard: Guard) -> TamedSwarm:
    key_pair = create_new_key_pair(identity.seed)
    peer_id = ID.from_pubkey(key_pair.public_key)
    peerstore = PeerStore()
    peerstore.add_key_pair(peer_id, key_pair)
    noise_key = create_new_x25519_key_pair().private_key
    return TamedSwarm(
        guard,
        tcp,
        peer_id,
        peerstore,
        Upgrader({NOISE_PROTOCOL: NoiseTransport(key_pair, noise_key)}, guard),
        retry_config=RetryConfig(max_retries=0),
        connection_config=ConnectionConfig(
            max_connections=NO_LIMIT,  # `TamedSwarm` makes room itself
            high_watermark=NO_LIMIT,
            max_connections_per_peer=NO_LIMIT,
            inbound_upgrade_timeout=HANDSHAKE_SECONDS,
            low_watermark=0,
            min_connections=0,
            auto_connect_interval=1e9,
        ),
    )
