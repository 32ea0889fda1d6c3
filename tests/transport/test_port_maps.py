"""Ports that a router is asked to forward: by NAT-PMP and UPnP, kept, and given back."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Awaitable, Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from swarm.transport.port_maps import igd
from swarm.transport.port_maps.gateway import (
    DATAGRAM_BYTES_MAX,
    TRIES,
    Gateway,
    Granted,
    MapRefused,
    NatPmp,
    Router,
    default_gateway,
    granted,
    request,
)
from swarm.transport.port_maps.keeper import (
    LEASE_SECONDS,
    RENEW_SECONDS_MAX,
    RENEW_SECONDS_MIN,
    RETRY_SECONDS,
    PortMaps,
)
from swarm.transport.port_maps.upnp import Upnp

HOME = Gateway("192.168.1.1", "192.168.1.2")
HERE = Gateway("127.0.0.1", "127.0.0.1")


def virtually(main: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
    """Run in virtual time, that jumps when nothing happens for a moment."""
    trio.run(main, *arguments, clock=trio.testing.MockClock(autojump_threshold=0.01))


# --- the default gateway -------------------------------------------------------------------------

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wlan0\t00000000\t0102000A\t0003\t0\t0\t600\t00000000\t0\t0\t0
lo\t00000000\t0100007F\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


def test_the_gateway_is_that_of_the_best_default_route(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(ROUTES)
    assert default_gateway(routes) == HERE


def test_a_machine_without_a_default_route_asks_nobody(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    assert default_gateway(routes) is None
    routes.write_text(ROUTES.splitlines()[0])
    assert default_gateway(routes) is None


# --- NAT-PMP -------------------------------------------------------------------------------------


def answer(inside: int, outside: int, seconds: int, result: int = 0, version: int = 0) -> bytes:
    return struct.pack("!BBHIHHI", version, 130, result, 7, inside, outside, seconds)


def test_a_request_is_that_of_the_rfc() -> None:
    assert request(4001, 14001, 3600).hex() == "00020000" + "0fa1" + "36b1" + "00000e10"


def test_a_refusal_is_one_clause() -> None:
    for datagram in (answer(4001, 0, 0, result=2), answer(4001, 1, 1, version=2)):
        with pytest.raises(MapRefused, match=r"^(it|its) "):
            granted(datagram, 4001)


@given(st.binary(max_size=DATAGRAM_BYTES_MAX))
def test_any_datagram_is_an_answer_or_none(datagram: bytes) -> None:
    try:
        found = granted(datagram, 4001)
    except MapRefused:
        return
    assert found is None or (0 <= found[0] < 2**16 and len(datagram) == 12)


class NatPmpRouter:
    """A router on this machine, with answers of the test's choosing."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, ...]] = []

    async def serve(self, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
            await udp.bind(("127.0.0.1", 0))
            task_status.started(udp.getsockname()[1])
            while True:
                datagram, sender = await udp.recvfrom(100)
                _, _, _, inside, outside, seconds = struct.unpack("!BBHHHI", datagram)
                self.asked.append((inside, outside, seconds))
                said = self.answers or [answer(inside, outside, seconds)]
                for each in said:
                    await udp.sendto(each, sender)


async def ask_router(router: NatPmpRouter, ports: dict[int, int]) -> Granted:
    async with trio.open_nursery() as nursery:
        port: int = await nursery.start(router.serve)
        found = await NatPmp(port).map(HERE, ports, LEASE_SECONDS)
        nursery.cancel_scope.cancel()
    return found


def test_ports_are_mapped_over_udp() -> None:
    found = trio.run(ask_router, NatPmpRouter(), {4001: 4001, 4002: 14002})
    assert found == Granted({4001: 4001, 4002: 14002}, LEASE_SECONDS)


def test_junk_and_answers_to_others_are_skipped() -> None:
    router = NatPmpRouter(
        b"", os.urandom(3), answer(9, 9, 9), answer(4001, 14001, 60) + b"x", answer(4001, 14001, 60)
    )
    assert trio.run(ask_router, router, {4001: 4001}) == Granted({4001: 14001}, 60)


def test_port_0_is_no_port() -> None:
    with pytest.RaisesGroup(MapRefused):
        trio.run(ask_router, NatPmpRouter(answer(4001, 0, 60)), {4001: 4001})


def test_a_router_without_it_is_known_at_once() -> None:
    async def main() -> None:
        with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as free:
            await free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        await NatPmp(port).map(HERE, {4001: 4001}, LEASE_SECONDS)

    with pytest.raises(MapRefused, match="does not speak it"):
        trio.run(main)


def test_a_silent_router_is_asked_a_few_times() -> None:
    class Silent(NatPmpRouter):
        async def serve(self, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
            with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
                await udp.bind(("127.0.0.1", 0))
                task_status.started(udp.getsockname()[1])
                while True:
                    self.asked.append(struct.unpack("!BBHHHI", await udp.recv(100)))

    async def main() -> None:
        silent = Silent()
        with pytest.RaisesGroup(MapRefused):
            await ask_router(silent, {4001: 4001})
        assert 1 <= len(silent.asked) <= TRIES

    virtually(main)


# --- UPnP: only the gateway is listened to -------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://192.168.1.1:5000/rootDesc.xml", True),
        ("http://192.168.1.1/d.xml", True),
        ("http://192.168.1.9:5000/rootDesc.xml", False),
        ("http://192.168.1.1@evil.example/", False),
        ("http://192.168.1.1#.evil.example/", False),
        ("http://192.168.1.1?.evil.example/", False),
        ("http://192.168.1.1:80@evil.example/", False),
        ("https://192.168.1.1/d.xml", False),
        ("file:///etc/passwd", False),
        ("http://192.168.1.1:99999/", False),
        ("http://[::1", False),
    ],
)
def test_a_description_is_read_from_the_gateway_only(url: str, good: bool) -> None:
    said = f"HTTP/1.1 200 OK\r\nST: x\r\nLocation: {url}\r\n\r\n".encode()
    assert igd.location_of(said, HOME.host) == (url if good else None)


@given(st.binary(max_size=300).map(lambda data: b"LOCATION: " + data))
def test_any_answer_is_a_location_or_none(data: bytes) -> None:
    found = igd.location_of(data, HOME.host)
    assert found is None or found.startswith("http://192.168.1.1")


DESCRIPTION = """<?xml version="1.0"?><root>{base}<device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><serviceList><service>
<serviceType>urn:schemas-upnp-org:service:WANIPConnection:1</serviceType>
<controlURL>{control}</controlURL></service></serviceList></device></root>"""


class Web:
    """A web server on one of this machine's addresses, which gives one answer to everything."""

    def __init__(self, host: str, answer: str = "") -> None:
        self.answer = answer
        self.asked: list[str] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(f"{self.command} {self.path}")
                body = web.answer.encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *ignored: Any) -> None: ...

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_port}"

    def __enter__(self) -> Web:
        threading.Thread(target=self._server.serve_forever, args=[0.01]).start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize("base", ["", "<URLBase>{other}/</URLBase>"])
def test_a_description_sends_this_peer_to_no_other_host(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contributor's own services trust what comes from his machine."""
    with Web("127.0.0.2") as other, Web(HERE.host) as gateway:
        monkeypatch.setattr(igd, "search", lambda *given: f"{gateway.url}/description.xml")
        control = "/control" if base else f"{other.url}/delete"
        gateway.answer = DESCRIPTION.format(base=base.format(other=other.url), control=control)
        for action in ("map", "unmap"):
            with pytest.raises(igd.Refused, match="names another host"):
                igd.run(action, HERE.host, HERE.own, 3600, {4001: 4001})
        assert not other.asked
        gateway.answer = DESCRIPTION.format(base="", control="/control")
        igd.run("map", HERE.host, HERE.own, 3600, {4001: 4001})
        assert gateway.asked[-1] == "POST /control"


class Device:
    """A gateway, as miniupnpc shows it."""

    lanaddr = "192.168.1.2"

    def __init__(self, *refusals: str) -> None:
        self.refusals = list(refusals)
        self.mapped: list[tuple[int, int, int]] = []

    def addportmapping(self, outside: int, *rest: Any) -> None:
        if self.refusals:
            raise Exception(self.refusals.pop(0))
        self.mapped.append((rest[2], outside, rest[-1]))


def test_a_port_that_another_has_is_replaced() -> None:
    device = Device("ConflictInMappingEntry")
    assert igd._add(device, 4001, 4001, 3600) in range(*igd.HIGH_PORTS)


def test_a_router_without_leases_maps_for_good() -> None:
    device = Device("OnlyPermanentLeasesSupported")
    assert igd._add(device, 4001, 4001, 3600) == 4001
    assert device.mapped == [(4001, 4001, 0)]


def test_a_full_router_is_asked_a_few_times() -> None:
    with pytest.raises(igd.Refused, match="taken"):
        igd._add(Device(*["ConflictInMappingEntry"] * 100), 4001, 4001, 3600)


def test_one_port_of_two_is_kept() -> None:
    class Full(Device):
        def addportmapping(self, outside: int, *rest: Any) -> None:
            if self.mapped:
                raise Exception("Action Not Authorized")
            super().addportmapping(outside, *rest)

    assert igd._add_all(Full(), 3600, {4001: 4001, 4002: 4002}) == {4001: 4001}


async def said_by(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> Granted:
    child = folder / "child.py"
    child.write_text(program)
    monkeypatch.setattr(igd, "__file__", str(child))
    return await Upnp().map(HOME, {4001: 4001, 4002: 4002}, 3600)


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(1)",
        "print('[' * 10_000)",
        'print(\'{"ports": {"4001": 0}}\')',
        'print(\'{"ports": {"80": 80}}\')',
        "while True: print('x' * 1000)",
    ],
)
def test_a_child_that_a_router_broke_grants_nothing(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MapRefused):
        trio.run(said_by, monkeypatch, tmp_path, program)


def test_the_childs_word_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"ports": {"4001": 4001, "4002": 30000}})
    found = trio.run(said_by, monkeypatch, tmp_path, f"print({said!r})")
    assert found == Granted({4001: 4001, 4002: 30000}, 3600)


# --- keeping -------------------------------------------------------------------------------------


class House:
    """A router in virtual time."""

    def __init__(self, name: str = "NAT-PMP", *, works: bool = True, seconds: float = 3600) -> None:
        self.name = name
        self.works = works
        self.seconds = seconds
        self.shift = 0
        self.held: dict[int, int] = {}
        self.asked_at: list[float] = []

    async def map(self, gateway: Gateway, ports: Mapping[int, int], seconds: int) -> Granted:
        await trio.lowlevel.checkpoint()
        self.asked_at.append(trio.current_time())
        if not self.works:
            raise MapRefused("it does not answer")
        self.held = {inside: outside + self.shift for inside, outside in ports.items()}
        return Granted(dict(self.held), self.seconds)

    async def unmap(self, gateway: Gateway, ports: Mapping[int, int]) -> None:
        await trio.lowlevel.checkpoint()
        assert dict(ports) == self.held
        self.held = {}


class Kept:
    """A keeper of two ports that ran for some time."""

    def __init__(self, *routers: Router, gateway: Gateway | None = HOME) -> None:
        self.changes: list[dict[int, int]] = []
        self.keeper = PortMaps(
            lambda own: [4001, 4002] if own == HOME.own else [],
            lambda: self.changes.append(dict(self.keeper.ports)),
            None,
            routers=routers,
            gateway=lambda: gateway,
        )

    async def during(self, seconds: float) -> None:
        wanted = trio.Event()
        wanted.set()
        with trio.move_on_after(seconds):
            await self.keeper.run(wanted)


def test_ports_are_renewed_and_given_back() -> None:
    house = House()
    kept = Kept(House("UPnP", works=False), house)

    async def main() -> None:
        await kept.during(2.5 * RENEW_SECONDS_MAX)

    virtually(main)
    assert kept.changes == [{4001: 4001, 4002: 4002}]
    assert [each - house.asked_at[0] for each in house.asked_at] == pytest.approx(
        [0, RENEW_SECONDS_MAX, 2 * RENEW_SECONDS_MAX]
    )
    assert kept.keeper.how == "192.168.1.1 forwards ports 4001 and 4002 by NAT-PMP"
    assert not house.held and not kept.keeper.ports


def test_nothing_is_asked_before_it_is_wanted() -> None:
    house = House()

    async def main() -> None:
        with trio.move_on_after(1000):
            await Kept(house).keeper.run(trio.Event())

    virtually(main)
    assert not house.asked_at


def test_a_router_cannot_make_a_peer_ask_all_the_time() -> None:
    house = House(seconds=1e-9)
    virtually(Kept(house).during, 10 * RENEW_SECONDS_MIN - 1)
    assert len(house.asked_at) == 10


def test_a_router_that_forwards_nothing_is_asked_seldom() -> None:
    houses = [House("NAT-PMP", works=False), House("UPnP", works=False)]
    kept = Kept(*houses)
    virtually(kept.during, 4 * RETRY_SECONDS - 1)
    assert [len(each.asked_at) for each in houses] == [4, 4]
    assert kept.keeper.how == (
        "192.168.1.1 forwards no port (NAT-PMP: it does not answer; UPnP: it does not answer)"
    )
    assert not kept.changes


def test_a_router_that_forgets_is_asked_again_by_each_protocol() -> None:
    old, new = House("NAT-PMP"), House("UPnP")
    kept = Kept(old, new)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept.during, 2 * RENEW_SECONDS_MAX)
            await trio.sleep(1)
            old.works, new.shift = False, 10_000

    virtually(main)
    assert kept.changes == [{4001: 4001, 4002: 4002}, {}, {4001: 14001, 4002: 14002}]


def test_a_machine_with_a_public_address_asks_nobody() -> None:
    house = House()
    virtually(Kept(house, gateway=None).during, 5 * RETRY_SECONDS)
    assert not house.asked_at


def test_a_peer_that_listens_elsewhere_asks_nobody() -> None:
    house = House()
    virtually(Kept(house, gateway=HERE).during, 5 * RETRY_SECONDS)
    assert not house.asked_at
