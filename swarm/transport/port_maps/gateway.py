"""The default gateway of this machine, and what asking it for a port can come to.

NAT-PMP, the NAT Port Mapping Protocol (RFC 6886): datagrams of 12 bytes to the gateway.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

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


PORT = 5351
VERSION = 0
MAP_TCP = 2
IS_ANSWER = 128

FIRST_SECONDS = 0.25
"""Wait for the first answer; it doubles with each repetition (RFC 6886, section 3.1)."""

TRIES = 4
"""The RFC allows nine, which take two minutes; a router in the same house answers at once."""

DATAGRAM_BYTES_MAX = 1100
"""Largest datagram read (RFC 6887, section 7)."""

REQUEST = struct.Struct("!BBHHHI")
ANSWER = struct.Struct("!BBHIHHI")

REFUSALS = {
    1: "it speaks another version",
    2: "its owner does not allow it",
    3: "it has no connection itself",
    4: "it has no port left",
    5: "it maps no TCP ports",
}


def request(inside: int, outside: int, seconds: int) -> bytes:
    """A request to map a TCP port for a time; 0 seconds end a mapping."""
    return REQUEST.pack(VERSION, MAP_TCP, 0, inside, outside, seconds)


def granted(datagram: bytes, inside: int) -> tuple[int, int] | None:
    """The outside port and the seconds in an answer; None if the datagram answers something else.

    Raises `MapRefused`.
    """
    if len(datagram) < 4:
        return None
    version, operation, result = struct.unpack_from("!BBH", datagram)
    if operation != MAP_TCP + IS_ANSWER and not (version != VERSION and operation >= IS_ANSWER):
        return None
    if version != VERSION or result:
        raise MapRefused(REFUSALS.get(result, f"it refuses with code {result}"))
    if len(datagram) != ANSWER.size:
        return None
    *_, mapped, outside, seconds = ANSWER.unpack(datagram)
    return (outside, seconds) if mapped == inside else None


class NatPmp:
    """Asks by NAT-PMP."""

    name = "NAT-PMP"

    def __init__(self, port: int = PORT) -> None:
        self._port = port

    async def map(self, gateway: Gateway, ports: Mapping[int, int], seconds: int) -> Granted:
        """See `Router.map`."""
        found: dict[int, int] = {}
        shortest = seconds
        for inside, outside in ports.items():
            try:
                given, lasts = await self._ask(gateway, inside, outside, seconds)
            except MapRefused:
                if found:
                    break  # one port is better than none
                raise
            if not given or not lasts:
                raise MapRefused("it grants no port")
            found[inside], shortest = given, min(shortest, lasts)
        return Granted(found, shortest)

    async def unmap(self, gateway: Gateway, ports: Mapping[int, int]) -> None:
        """See `Router.unmap`."""
        for inside in ports:
            await self._ask(gateway, inside, 0, 0)

    async def _ask(
        self, gateway: Gateway, inside: int, outside: int, seconds: int
    ) -> tuple[int, int]:
        """Send a request until it is answered; the socket takes datagrams of the gateway only."""
        with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
            try:
                await udp.connect((gateway.host, self._port))
                for attempt in range(TRIES):
                    await udp.send(request(inside, outside, seconds))
                    with trio.move_on_after(FIRST_SECONDS * 2**attempt):
                        while True:
                            found = granted(await udp.recv(DATAGRAM_BYTES_MAX), inside)
                            if found is not None:
                                return found
            except OSError as error:
                raise MapRefused("it does not speak it") from error
        raise MapRefused("it does not answer")
