"""Multiaddrs: parsing, resolving and expanding them, and explaining why dialling one failed.

Addresses that a user lets a peer announce: a forwarded port, or a name."""

import contextlib
import errno
import ipaddress
import os
import socket
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

import trio
from libp2p.io.exceptions import IncompleteReadError
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from multiaddr import Multiaddr
from multiaddr.utils import get_network_addrs

from swarm.errors import UserError
from swarm.transport import DialFailure
from swarm.transport.http.messages import Unreachable, split_root
from swarm.transport.libp2p.guard import innermost, reason_of
from swarm.wire.identity import InvalidPeerId, PeerId, public_key_of

LOOPBACK = ("/ip4/127.", "/ip6/::1/")
"""Beginnings of the addresses that only peers on the same machine can use."""

CIRCUIT = "/p2p-circuit"

RESOLVED_MAX = 4
"""IP addresses tried for one name."""

_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


def parse_multiaddr(text: str) -> tuple[Multiaddr, PeerId | None]:
    """Parse a typed TCP multiaddr, and the peer id at its end, if any. Raises `UserError`."""
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
    """Raise `UserError` for a port in use, which libp2p would share; port 0: the host only."""
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
    """An address for each IP of its name, with `/etc/hosts`; raises `socket.gaierror`."""
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
    return str(address).partition("/p2p/")[0]


def expanded(addresses: Sequence[Multiaddr]) -> list[Multiaddr]:
    """Replace 0.0.0.0 and :: by the addresses of the interfaces, loopback last."""
    result: list[Multiaddr] = []
    for address in addresses:
        host, port = host_and_port(address)
        if host not in ("0.0.0.0", "::"):
            result.append(address)
            continue
        hosts = get_network_addrs(6 if ":" in host else 4)
        hosts = sorted(hosts, key=lambda each: ipaddress.ip_address(each).is_loopback)
        result += [multiaddr(each, port) for each in hosts]
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


ANNOUNCED_MAX = 8
"""Addresses of each plane. A peer record has room for 16, relays' addresses included."""


@dataclass(frozen=True)
class Announced:
    """What a peer announces beside the addresses of its interfaces, or instead of them."""

    addresses: tuple[str, ...] = ()
    """TCP multiaddrs without a peer id."""
    bulk: tuple[str, ...] = ()
    """`http://host:port` roots."""
    detected: bool = True
    """Announce the detected addresses as well."""

    def ports(self) -> list[int]:
        """The forwarded TCP ports."""
        return [int(Multiaddr(each).value_for_protocol("tcp")) for each in self.addresses]


def announced(
    addresses: Sequence[str], bulk: Sequence[str], *, detected: bool, peer: str
) -> Announced:
    """Check a peer's settings `announce`, `announce_bulk` and `announce_detected`; `peer`: its id,
    empty if unknown yet. Raises `UserError`."""
    for name, given in (("announce", addresses), ("announce_bulk", bulk)):
        if len(given) > ANNOUNCED_MAX:
            raise UserError(f"{name} has {len(given)} addresses; give at most {ANNOUNCED_MAX}")
    if not detected and not addresses:
        raise UserError(
            "announce_detected is false and announce is empty, so nobody would find this peer; "
            "add an address to announce"
        )
    return Announced(
        tuple(_checked(each, peer) for each in addresses),
        tuple(_checked_root(each) for each in bulk),
        detected,
    )


def _checked(text: str, peer: str) -> str:
    try:
        address, named = parse_multiaddr(text)
    except UserError as error:
        raise UserError(f"announce: {error}") from error
    host = str(address.value_for_protocol(next(iter(address.protocols())).name))
    port = int(address.value_for_protocol("tcp"))
    if "p2p-circuit" in text or port == 0 or _is_any(host):
        raise UserError(
            f"announce has {text!r}, which no other peer can connect to; write the address and "
            "port of the router or proxy, like /ip4/192.0.2.7/tcp/4001 or /dns4/NAME/tcp/4001"
        )
    if peer and named not in (None, peer):
        raise UserError(f"announce has {text!r}, which names another peer; this one is {peer}")
    return text.partition("/p2p/")[0]


def _is_any(host: str) -> bool:
    """Whether a host is an IP address that is no machine's; a name is none."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.is_unspecified or ip.is_multicast


def _checked_root(text: str) -> str:
    try:
        host, _, secure = split_root(text)
        nowhere = secure or not urllib.parse.urlsplit(text).port or _is_any(host)
    except Unreachable:
        nowhere = True
    if nowhere:
        raise UserError(
            f"announce_bulk has {text!r}, which is no address of the piece plane; "
            "write it like http://192.0.2.7:4002"
        )
    return text
