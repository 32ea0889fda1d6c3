"""Multiaddrs: parsing, resolving and expanding them, and explaining why dialling one failed."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence

import trio
from libp2p.io.exceptions import IncompleteReadError
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from multiaddr import Multiaddr
from multiaddr.utils import get_network_addrs

from swarm.errors import UserError
from swarm.transport import DialFailure
from swarm.transport.libp2p.guard import innermost, reason_of
from swarm.wire.identity import InvalidPeerId, PeerId, public_key_of

LOOPBACK = ("/ip4/127.", "/ip6/::1/")
"""Beginnings of the addresses that only peers on the same machine can use."""

CIRCUIT = "/p2p-circuit"

RESOLVED_MAX = 4
"""IP addresses tried for one name."""

_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


def parse_multiaddr(text: str) -> tuple[Multiaddr, PeerId | None]:
    """Parse a TCP multiaddr that a person typed, and the peer id that it ends in, if any.

    Raises `UserError`.
    """
    try:
        address = Multiaddr(text)
        protocols = [protocol.name for protocol in address.protocols()]
    except Exception as error:  # multiaddr raises a dozen unrelated types
        raise UserError(
            f"{text!r} is not a multiaddr; write it like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"
        ) from error
    if "tcp" not in protocols or protocols[0] not in ("ip4", "ip6", "dns", "dns4", "dns6"):
        raise UserError(
            f"{text!r} has no IP address or name with a TCP port; "
            "write it like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"
        )
    peer = address.get_peer_id()
    if peer is None:
        return address, None
    try:
        public_key_of(peer)
    except InvalidPeerId as error:
        raise UserError(f"{text!r} does not end in an Ed25519 peer id (12D3KooW…)") from error
    return address, PeerId(peer)


def check_port_free(host: str, port: int) -> None:
    """Raise `UserError` if this peer cannot listen on a port, usually since another process does.

    libp2p would share the port silently. Port 0 checks only the host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(
                    f"{host} is no address of this machine; listen on one of its own, or on "
                    "0.0.0.0 for every interface"
                ) from error
            raise UserError(
                f"port {port} on {host} is taken or not allowed ({error.strerror}); choose another"
            ) from error


async def resolved(address: Multiaddr) -> list[Multiaddr]:
    """Replace the name in an address by each IP address that this machine finds for it.

    libp2p itself would ask a DNS server and ignore `/etc/hosts`. Raises `socket.gaierror`.
    """
    protocol = next(iter(address.protocols())).name
    if protocol not in _FAMILIES:
        return [address]
    found = await trio.socket.getaddrinfo(
        address.value_for_protocol(protocol),
        None,
        family=_FAMILIES[protocol],
        type=socket.SOCK_STREAM,
    )
    rest = str(address).split("/", 3)[3]
    hosts = list(dict.fromkeys(str(entry[4][0]) for entry in found))[:RESOLVED_MAX]
    return [Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/{rest}") for host in hosts]


def dial_failure(text: str, error: BaseException) -> DialFailure:
    """Explain to a person why dialling an address failed."""
    cause = innermost(error)
    if isinstance(cause, socket.gaierror):
        return DialFailure(
            text,
            f"the name {text.split('/')[2]} does not resolve ({cause.strerror})",
            "check its spelling, and this machine's DNS",
        )
    if isinstance(cause, PeerIDMismatchesPubkey):
        other = str(cause).rpartition("=")[2]
        return DialFailure(
            text,
            f"another peer answers there, {other}",
            "ask for the address again: its peer has another key now, or runs elsewhere",
        )
    if isinstance(cause, ConnectionRefusedError):
        return DialFailure(
            text, "no program listens on that port", "check the port, and that the peer runs"
        )
    ended = isinstance(cause, IncompleteReadError) and cause.is_clean_close
    if ended or isinstance(cause, ConnectionResetError):
        return DialFailure(
            text,
            "it closed the connection at once",
            "it has no room for newcomers, or another program has that port: try again later, or "
            "through another bootstrap peer",
            may_pass=True,
            turned_away=True,
        )
    if isinstance(cause, OSError) and cause.errno is not None:
        return DialFailure(text, os.strerror(cause.errno).lower())
    return DialFailure(text, reason_of(error))


def host_and_port(address: Multiaddr) -> tuple[str, int]:
    for name in ("ip4", "ip6"):
        with contextlib.suppress(Exception):
            host = address.value_for_protocol(name)
            if host is not None:
                return str(host), int(address.value_for_protocol("tcp") or 0)
    raise UserError(f"{address} has no IP address to listen on")


def require_peer(text: str) -> tuple[Multiaddr, PeerId]:
    address, peer = parse_multiaddr(text)
    if peer is None:
        raise UserError(f"{text!r} does not name its peer; it must end in /p2p/12D3KooW…")
    return address, peer


def without_peer(address: Multiaddr) -> str:
    text = str(address)
    return text.partition("/p2p/")[0]


def expanded(addresses: Sequence[Multiaddr]) -> list[Multiaddr]:
    """Replace 0.0.0.0 and :: by the addresses of the interfaces, loopback last."""
    result: list[Multiaddr] = []
    for address in addresses:
        host, port = host_and_port(address)
        name, version = ("ip6", 6) if ":" in host else ("ip4", 4)
        if host not in ("0.0.0.0", "::"):
            result.append(address)
            continue
        hosts = sorted(
            get_network_addrs(version), key=lambda h: ipaddress.ip_address(h).is_loopback
        )
        result += [Multiaddr(f"/{name}/{host}/tcp/{port}") for host in hosts]
    return result


def default_listen() -> list[str]:
    """Any port of IPv4, and of IPv6 if this machine has a global address."""
    result = ["/ip4/0.0.0.0/tcp/0"]
    if any(is_global(address) for address in expanded([Multiaddr("/ip6/::/tcp/0")])):
        result.append("/ip6/::/tcp/0")
    return result


def multiaddr(host: str, port: int) -> Multiaddr:
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")


def by_relay(addresses: Sequence[str]) -> list[list[str]]:
    """Relayed addresses, those of the same relay together."""
    relays: dict[str, list[str]] = {}
    for address in addresses:
        relay = address.partition(CIRCUIT)[0].rpartition("/")[2]
        relays.setdefault(relay, []).append(address)
    return list(relays.values())


def may_be_global(text: str) -> bool:
    """Whether a multiaddr has a name or a global IP address."""
    with contextlib.suppress(ValueError, IndexError):
        _, kind, host = text.split("/")[:3]
        return kind.startswith("dns") or ipaddress.ip_address(host).is_global
    return False


def is_global(address: Multiaddr) -> bool:
    return ipaddress.ip_address(host_and_port(address)[0]).is_global
