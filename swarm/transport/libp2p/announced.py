"""Addresses that a user lets a peer announce: a forwarded port, or a name."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from multiaddr import Multiaddr

from swarm.errors import UserError
from swarm.transport.http.messages import Unreachable, split_root
from swarm.transport.libp2p.addresses import parse_multiaddr

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
    """Check the settings `announce`, `announce_bulk` and `announce_detected` of a peer.

    `peer`: its id, or empty before it is known. Raises a `UserError` that names setting, value and
    remedy.
    """
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
    first = next(iter(address.protocols())).name
    host = str(address.value_for_protocol(first))
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
