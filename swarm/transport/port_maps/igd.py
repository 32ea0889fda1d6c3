"""A program that asks a UPnP gateway (IGD) for ports, and ends: run by `upnp.py`.

A process of its own, because the library (miniupnpc, in C) blocks and reads the XML of whatever
answers: here it has limits on memory, processor and time, and nothing else to lose. It imports
nothing of Swarm, so that it starts within a tenth of a second.
"""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import socket
import sys
import time
from typing import Any

MEMORY_BYTES = 256 << 20
"""Address space, of which an honest gateway needs a tenth."""

CPU_SECONDS = 5
SECONDS_MAX = 15
"""Then the system ends this process, whatever it waits for."""

SEARCH = ("239.255.255.250", 1900)
SEARCH_SECONDS = 3.0
SEARCHES = 3
"""Repetitions, since datagrams get lost."""

DATAGRAMS_MAX = 200
"""Answers read: other devices of the house answer too, and are ignored."""

ANSWER_BYTES_MAX = 4096

QUESTION = b"""M-SEARCH * HTTP/1.1\r
HOST: 239.255.255.250:1900\r
MAN: "ssdp:discover"\r
MX: 1\r
ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r
\r
"""

PORTS_TRIED = 3
"""Outside ports that are asked for, if the first ones are another's."""

HIGH_PORTS = (20000, 60000)


class Refused(Exception):
    """A clause that says why there is no port."""


def is_on(gateway: str, url: str) -> bool:
    """Whether a URL leads to the gateway itself.

    Only the plainest form counts: two parsers may find different hosts in any other one.
    """
    found = re.fullmatch(r"http://([0-9.]+)(?::([0-9]{1,5}))?(?:/[!-~]*)?", url)
    return found is not None and found[1] == gateway and 0 < int(found[2] or 80) < 65536


def location_of(answer: bytes, gateway: str) -> str | None:
    """The address of a device's description; None if it is not on the gateway itself.

    So a device of the house, or a datagram from outside, cannot send this program elsewhere.
    """
    for line in answer.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"location":
            url = value.strip().decode("ascii", "replace")
            return url if is_on(gateway, url) else None
    return None


def search(gateway: str, own: str) -> str:
    """The address of the gateway's description (SSDP); raises `Refused`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own))
        udp.bind((own, 0))
        deadline = 0.0
        sent = 0
        ends = time.monotonic() + SEARCH_SECONDS
        for _ in range(DATAGRAMS_MAX):
            if time.monotonic() >= deadline:
                if sent == SEARCHES:
                    break
                udp.sendto(QUESTION, SEARCH)
                sent += 1
                deadline = ends - SEARCH_SECONDS * (SEARCHES - sent) / SEARCHES
            udp.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                answer, (sender, _) = udp.recvfrom(ANSWER_BYTES_MAX)
            except TimeoutError:
                continue
            url = location_of(answer, gateway) if sender == gateway else None
            if url is not None:
                return url
    raise Refused("it does not answer")


def _add(device: Any, inside: int, outside: int, seconds: int) -> int:
    """Map a port; returns the outside one."""
    for _ in range(PORTS_TRIED):
        for lease in (seconds, 0):  # some routers know mappings without an end only
            try:
                device.addportmapping(outside, "TCP", device.lanaddr, inside, "swarm", "", lease)
                return outside
            except Exception as error:  # the library raises nothing more precise
                why = str(error)
            if "Permanent" not in why:
                break
        if "Conflict" not in why:
            raise Refused(f"it refuses ({why})")
        outside = random.randrange(*HIGH_PORTS)
    raise Refused("its ports are taken")


def _add_all(device: Any, seconds: int, pairs: dict[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for inside, outside in pairs.items():
        try:
            found[inside] = _add(device, inside, outside, seconds)
        except Refused:
            if not found:
                raise
            break  # one port is better than none
    return found


def run(action: str, gateway: str, own: str, seconds: int, pairs: dict[int, int]) -> dict[int, int]:
    """Map ports, or end their mappings; raises `Refused`."""
    import miniupnpc

    device = miniupnpc.UPnP()
    url = search(gateway, own)
    try:
        control = device.selectigd(url)
    except Exception as error:
        raise Refused(f"its description is of no use ({error})") from error
    if not is_on(gateway, control):  # a POST of the router's choice to any host, this one included
        raise Refused("its description names another host")
    if action == "map":
        return _add_all(device, seconds, pairs)
    for outside in pairs.values():
        try:
            device.deleteportmapping(outside, "TCP")
        except Exception as error:
            raise Refused(f"it refuses ({error})") from error
    return {}


def main(arguments: list[str]) -> None:
    """Print a JSON object: `ports`, outside by inside, or `refused`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    signal.alarm(SECONDS_MAX)
    action, gateway, own, seconds, *given = arguments
    pairs = {int(inside): int(outside) for inside, outside in (each.split(":") for each in given)}
    try:
        print(json.dumps({"ports": run(action, gateway, own, int(seconds), pairs)}))
    except ImportError:
        print(json.dumps({"refused": "miniupnpc is not installed"}))
    except (Refused, OSError, MemoryError) as error:
        print(json.dumps({"refused": str(error)[:200]}))


if __name__ == "__main__":
    main(sys.argv[1:])
