"""Bootstrap addresses by name, with a DNS server of ours, and against answers of any kind."""

from __future__ import annotations

import string
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import dns.asyncresolver
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import PeerError, UserError
from swarm.events import Event
from swarm.node.joining import join_network
from swarm.node.local import open_node
from swarm.node.node import Node
from swarm.settings import PeerSettings
from swarm.transport import ConnectError
from swarm.transport.libp2p import dnsaddr, require_peer
from swarm.transport.libp2p.dnsaddr import NoRecords, check_bootstrap, expand, look_up
from swarm.wire.identity import Identity

IDS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 4)]
FIRST, SECOND = (f"/ip4/192.0.2.{n}/tcp/4001/p2p/{IDS[n]}" for n in (0, 1))

Zone = dict[str, Sequence[str]]


class Names:
    """Answers from a table, and counts the questions."""

    def __init__(self, zone: Zone) -> None:
        self.zone = zone
        self.asked: list[str] = []

    async def __call__(self, name: str) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        self.asked.append(name)
        if name not in self.zone:
            raise NoRecords(f"the name {name} does not exist")
        return self.zone[name]


def expanded(text: str, names: Names) -> list[str]:
    return trio.run(expand, text, names)


def test_a_name_stands_for_the_peers_in_its_records() -> None:
    names = Names(
        {
            "_dnsaddr.example.org": [
                f"dnsaddr={FIRST}",
                f"dnsaddr=/ip4/192.0.2.9/udp/4001/quic-v1/p2p/{IDS[0]}",
                f"dnsaddr=/dns4/a.example.org/tcp/443/wss/p2p/{IDS[0]}",
                "dnsaddr=/ip4/192.0.2.9/tcp/4001",
                "v=spf1 -all",
                "dnsaddr=/dnsaddr/eu.example.org",
                "dnsaddr=/dnsaddr/gone.example.org",
            ],
            "_dnsaddr.eu.example.org": [f"dnsaddr={SECOND}", "dnsaddr=/dnsaddr/example.org"],
        }
    )
    assert set(expanded("/dnsaddr/example.org", names)) == {FIRST, SECOND}
    assert len(names.asked) == 3, "a circle of names is followed once"
    assert expanded(f"/dnsaddr/example.org/p2p/{IDS[1]}", names) == [SECOND]
    assert expanded(FIRST, names) == [FIRST]


@pytest.mark.parametrize(
    ("zone", "reason"),
    [
        ({}, "the name _dnsaddr.example.org does not exist"),
        ({"_dnsaddr.example.org": ["v=spf1 -all"]}, "it names no peer that answers over TCP"),
    ],
)
def test_a_name_that_stands_for_nobody_says_why(zone: Zone, reason: str) -> None:
    with pytest.raises(ConnectError, match=reason) as error:
        expanded("/dnsaddr/example.org", Names(zone))
    assert [each.address for each in error.value.failures] == ["/dnsaddr/example.org"]


def test_a_name_that_makes_work_makes_little() -> None:
    class Endless(Names):
        async def __call__(self, name: str) -> Sequence[str]:
            self.asked.append(name)
            label = string.ascii_lowercase[len(self.asked) % 26] * (len(self.asked) % 20 + 1)
            more = [f"dnsaddr=/dnsaddr/{label}{n}.{name[9:]}"[:200] for n in range(20)]
            hosts = (f"10.0.{n // 250}.{n % 250}" for n in range(900))
            return [*more, *(f"dnsaddr=/ip4/{host}/tcp/1/p2p/{IDS[0]}" for host in hosts)]

    names = Endless({})
    assert len(expanded("/dnsaddr/example.org", names)) == dnsaddr.ADDRESSES_MAX
    assert len(names.asked) <= dnsaddr.LOOKUPS_MAX


records = st.one_of(
    st.text(),
    st.builds("dnsaddr={}".format, st.text()),
    st.builds("dnsaddr=/dnsaddr/{}".format, st.text()),
    st.builds("dnsaddr={}/{}".format, st.sampled_from([FIRST, SECOND]), st.text(max_size=3)),
)


@settings(max_examples=50)
@given(st.lists(records, max_size=5))
def test_no_answer_breaks_a_peer(found: list[str]) -> None:
    try:
        addresses = expanded("/dnsaddr/example.org", Names({"_dnsaddr.example.org": found}))
    except ConnectError:
        return
    for address in addresses:
        assert address.startswith("/") and require_peer(address)


@pytest.mark.parametrize(
    "text", ["/dnsaddr/", "/dnsaddr/a b", "/dnsaddr/example.org/tcp/1", "/dnsaddr/x/p2p/12D3Koo"]
)
def test_a_mistyped_name_is_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match="is not a name of bootstrap peers; write it like"):
        check_bootstrap(text)


# --- a server ------------------------------------------------------------------------------------

Answer = Callable[[dns.message.Message], bytes]


def answering(zone: Zone, query: dns.message.Message) -> bytes:
    (question,) = query.question
    name = question.name.to_text(omit_final_dot=True)
    response = dns.message.make_response(query)
    if name not in zone:
        response.set_rcode(dns.rcode.NXDOMAIN)
    elif zone[name]:
        texts = (f'"{text}"' for text in zone[name])
        response.answer.append(dns.rrset.from_text(question.name, 60, "IN", "TXT", *texts))
    return response.to_wire()


@asynccontextmanager
async def server(answer: Answer | None) -> AsyncIterator[dnsaddr.LookUp]:
    """Run a DNS server on loopback, silent without `answer`; yields how to ask it."""
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
        await udp.bind(("127.0.0.1", 0))
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers = ["127.0.0.1"]
        resolver.port = udp.getsockname()[1]

        async def serve() -> None:
            while True:
                wire, client = await udp.recvfrom(4096)
                if answer is not None:
                    await udp.sendto(answer(dns.message.from_wire(wire)), client)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield partial(look_up, resolver=resolver)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (partial(answering, {}), "does not exist"),
        (partial(answering, {"_dnsaddr.example.org": []}), "has no TXT records"),
        (None, "no DNS server answered within 0.3 s"),
        (lambda query: b"nonsense", "no DNS server answered within 0.3 s"),
    ],
)
def test_servers_that_do_not_help(
    answer: Answer | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.transport.libp2p.dnsaddr.LOOKUP_SECONDS", 0.3)

    async def main() -> None:
        async with server(answer) as ask:
            with pytest.raises(ConnectError, match=reason):
                await expand("/dnsaddr/example.org", ask)

    trio.run(main)


@asynccontextmanager
async def peer(
    home: Path, role: str, ask: dnsaddr.LookUp, *bootstrap: str
) -> AsyncIterator[tuple[Node, list[Event]]]:
    ours = PeerSettings(
        role=[role],
        bootstrap=list(bootstrap),
        listen=["/ip4/127.0.0.1/tcp/0"],
        home=str(home),
    )
    events: list[Event] = []
    async with open_node(ours, events_sink=events.append) as node:
        node.expand = partial(expand, look_up=ask)
        yield node, events


def test_a_list_is_tried_side_by_side_and_the_dead_are_named(tmp_path: Path) -> None:
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{IDS[2]}"
    zone: Zone = {}

    async def main() -> None:
        async with (
            server(partial(answering, zone)) as ask,
            peer(tmp_path / "b", "bootstrap", ask) as (living, _),
        ):
            found = living.transport.addresses()
            zone["_dnsaddr.example.org"] = [f"dnsaddr={each}" for each in found]
            listed = (dead, "/dnsaddr/gone.example.org", "/dnsaddr/example.org")
            async with peer(tmp_path / "p", "inference", ask, *listed) as (node, events):
                assert list(await join_network(node)) == [living.peer_id]
                (said,) = (e.fields for e in events if e.name == "dht.bootstrap_partly_silent")
                assert said["reasons"] == [
                    f"{dead}: no program listens on that port",
                    "/dnsaddr/gone.example.org: the name _dnsaddr.gone.example.org does not exist",
                ]
            silent = (dead, "/dnsaddr/gone.example.org")
            async with peer(tmp_path / "q", "inference", ask, *silent) as (node, _):
                with pytest.raises(PeerError) as error:
                    await join_network(node)
                for address in silent:
                    assert f"{address}: " in str(error.value)

    trio.run(main)
