"""The real network: libp2p over TCP, noise (nothing else) and yamux, with relays.

    listen = ["/ip4/0.0.0.0/tcp/4001"]
    async with open_libp2p(identity, listen, world=world, disk=disk) as transport:
        await transport.connect(peer, addresses)

`docs/decisions/libp2p.md` lists the defects of libp2p 0.8.1 and how this package repairs them.
"""

# First: it imports libp2p.
import swarm.transport.libp2p.lean  # noqa: F401

# isort: split
from swarm.transport.libp2p.addresses import check_port_free, parse_multiaddr, require_peer
from swarm.transport.libp2p.opening import open_libp2p
from swarm.transport.libp2p.transport import Libp2pTransport

__all__ = ["Libp2pTransport", "check_port_free", "open_libp2p", "parse_multiaddr", "require_peer"]
