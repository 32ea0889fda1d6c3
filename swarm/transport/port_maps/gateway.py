"""The default gateway of this machine, and what asking it for a port can come to."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ROUTES = Path("/proc/net/route")
"""Linux' IPv4 routes, one a line. Other systems have none here, so no router is asked there."""

UP, VIA_GATEWAY = 0x1, 0x2
"""Flags of a route (`RTF_UP`, `RTF_GATEWAY`)."""

ANY_PORT = 9
"""A UDP port for a socket that sends nothing."""


class MapRefused(Exception):
    """The router does not forward the port. The text is a clause that says why."""


@dataclass(frozen=True)
class Gateway:
    """The router that this machine's traffic to the internet goes through."""

    host: str
    """IPv4 address."""
    own: str
    """This machine's address on the router's network."""


@dataclass(frozen=True)
class Granted:
    """Ports that a router forwards."""

    ports: Mapping[int, int]
    """Outside port by inside port."""
    seconds: float
    """Until the router forgets them."""


class Router(Protocol):
    """One way to ask a router for ports."""

    name: str

    async def map(self, gateway: Gateway, ports: Mapping[int, int], seconds: int) -> Granted:
        """Ask for TCP ports, outside by inside port, for a time; raises `MapRefused`.

        The router may grant other outside ports, and only the first ones.
        """
        ...

    async def unmap(self, gateway: Gateway, ports: Mapping[int, int]) -> None:
        """Give ports back; raises `MapRefused`."""
        ...


def default_gateway(routes: Path = ROUTES) -> Gateway | None:
    """Find the default gateway; None if there is none, or this machine has a public address."""
    try:
        lines = routes.read_text(encoding="ascii").splitlines()[1:]
    except (OSError, ValueError):
        return None
    host = _host(lines)
    if host is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, ANY_PORT))
        except OSError:
            return None
        own = probe.getsockname()[0]
    return None if ipaddress.ip_address(own).is_global else Gateway(host, own)


def _host(lines: list[str]) -> str | None:
    """The gateway of the default route with the lowest metric."""
    found: list[tuple[int, str]] = []
    for line in lines:
        fields = line.split()
        if len(fields) < 8 or fields[1] != "00000000" or fields[7] != "00000000":
            continue
        if int(fields[3], 16) & (UP | VIA_GATEWAY) == UP | VIA_GATEWAY:
            packed = int(fields[2], 16).to_bytes(4, sys.byteorder)
            found.append((int(fields[6]), str(ipaddress.IPv4Address(packed))))
    return min(found)[1] if found else None
