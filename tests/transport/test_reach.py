"""Dial-back: what peers learn about their own reachability, and what askers cannot do with it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.transport import Reachability, StreamError
from swarm.transport.libp2p.addresses import Announced, announced, may_be_global
from swarm.transport.libp2p.dial_back import (
    DIALS_MAX,
    PORTS_MAX,
    PROTOCOL,
    QUESTIONS_BURST,
    SEEN,
    Answer,
    DialBack,
    Question,
    ask,
)
from swarm.transport.libp2p.reach import Reach
from swarm.wire.identity import PeerId
from tests.network.harness import identity
from tests.transport.harness import ALICE, BOB, CAROL
from tests.transport.test_libp2p_security import Peers
from tests.worlds import VirtualWorld

pytestmark = pytest.mark.wall_clock


class Dialled:
    """Peers that answer at some ports, instead of a network."""

    def __init__(self, *open_ports: int) -> None:
        self.open = open_ports
        self.dialled: list[str] = []

    async def handshake(self, address: Any, peer: Any) -> None:
        self.dialled.append(str(address))
        await trio.lowlevel.checkpoint()
        if int(address.value_for_protocol("tcp")) not in self.open:
            raise ConnectionRefusedError


def asked(back: DialBack, ports: list[int], peer: PeerId = ALICE.peer_id) -> Answer:
    return trio.run(back._answer, peer, Question(ports))


def test_only_the_askers_own_address_is_dialled() -> None:
    dialled = Dialled(4001)
    back = DialBack(dialled.handshake, lambda peer: ("8.8.8.8", 5555), lambda: 0.0)
    assert asked(back, [4001, 4002, SEEN]) == Answer("8.8.8.8", 5555, [4001])
    assert sorted(dialled.dialled) == [f"/ip4/8.8.8.8/tcp/{n}" for n in (4001, 4002, 5555)]


def test_a_relayed_asker_is_not_dialled() -> None:
    dialled = Dialled(4001)
    back = DialBack(dialled.handshake, lambda peer: None, lambda: 0.0)
    assert asked(back, [4001]).refused
    assert not dialled.dialled


def test_questions_of_one_network_are_limited_whatever_their_identities() -> None:
    dialled, now = Dialled(), [0.0]
    back = DialBack(
        dialled.handshake, lambda peer: (f"8.8.8.{len(dialled.dialled)}", 1), lambda: now[0]
    )
    answers = [asked(back, [4001], identity(n).peer_id) for n in range(1, 100)]
    assert sum(not each.refused for each in answers) == QUESTIONS_BURST == len(dialled.dialled)
    now[0] = 60.0
    assert not asked(back, [4001]).refused


async def test_dials_at_once_are_limited() -> None:
    class Slow(Dialled):
        async def handshake(self, address: Any, peer: Any) -> None:
            self.dialled.append(str(address))
            await trio.sleep_forever()

    slow = Slow()
    networks = iter(range(100))
    back = DialBack(slow.handshake, lambda peer: (f"8.8.{next(networks)}.8", 1), lambda: 0.0)
    ports = list(range(1, PORTS_MAX + 1))
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(back._answer, ALICE.peer_id, Question(ports))
        await trio.testing.wait_all_tasks_blocked()
        assert len(slow.dialled) == DIALS_MAX
        nursery.cancel_scope.cancel()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_question_or_a_broken_stream(data: bytes) -> None:
    class Asked(Any):  # type: ignore[misc]
        peer = ALICE.peer_id
        answer = b""

        async def receive(self) -> bytes:
            await trio.lowlevel.checkpoint()
            return data

        async def send(self, frame: bytes) -> None:
            await trio.lowlevel.checkpoint()
            self.answer = frame

    async def main() -> None:
        dialled = Dialled()
        stream = Asked()
        try:
            await DialBack(dialled.handshake, lambda peer: ("8.8.8.8", 1), lambda: 0.0).serve(
                stream
            )
        except StreamError:
            assert not dialled.dialled
        else:
            assert msgspec.msgpack.decode(stream.answer, type=Answer).host == "8.8.8.8"

    trio.run(main)


class Said:
    """A stream to a peer that answers these bytes."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame

    async def send(self, frame: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._frame


@pytest.mark.parametrize(
    "answer",
    [
        Answer("fe80::1%eth0", 1, [4001]),
        Answer("0.0.0.0", 1, [4001]),
        Answer("ff02::1", 1, [4001]),
        Answer("example.org", 1, [4001]),
        Answer("8.8.8.8", 0, []),
        Answer("8.8.8.8", 1, [22]),
        Answer("8.8.8.8", 1, [0]),
    ],
)
def test_a_hostile_answer_breaks_the_stream_only(answer: Answer) -> None:
    with pytest.raises(StreamError):
        stream: Any = Said(msgspec.msgpack.encode(answer))
        trio.run(ask, stream, [4001, SEEN])


# --- over loopback -------------------------------------------------------------------------------


async def test_a_listening_peer_learns_that_others_reach_it(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        alice, bob = await peers.open(ALICE), await peers.open(BOB)
        assert alice.reachability() is Reachability.UNKNOWN
        await alice.connect(BOB.peer_id, bob.addresses())
        with trio.fail_after(8):
            while Reachability.UNKNOWN in (alice.reachability(), bob.reachability()):  # noqa: ASYNC110
                await trio.sleep(0.05)
        assert alice.reachability() is Reachability.PUBLIC
        assert BOB.peer_id in alice.reachability_reason()
        assert not alice.wants_relay()


async def test_the_asked_peer_reaches_the_right_port_only(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        alice, bob = await peers.open(ALICE), await peers.open(BOB)
        carol = await peers.open(CAROL)
        await alice.connect(BOB.peer_id, bob.addresses())
        stream = await alice.open_stream(BOB.peer_id, PROTOCOL)
        own, other = alice._ports()[0], carol._ports()[0]
        answer = await ask(stream, [own, other, 1])
        assert answer.reached == [own], "another peer's port does not count"
        assert answer.host == "127.0.0.1"
        assert alice.connected() == [BOB.peer_id], "the proof leaves no connection"


# --- what is made of the answers -----------------------------------------------------------------

OWN = "192.168.1.2"
OUT = "8.8.8.8"
PEERS = [PeerId(name) for name in ("a", "b", "c")]


class Answering:
    """Connected peers with given answers, each in a network of its own."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers

    def network_of(self, peer: PeerId) -> str:
        return f"network of {peer}"


def concluded(*answers: Answer, own: str = OWN, forwarded: tuple[int, ...] = ()) -> Reach:
    """What a peer that listens at port 4001 makes of answers."""
    from swarm.transport.libp2p.reach import Told

    transport: Any = Answering()
    reach = Reach(
        transport,
        lambda peer: (OUT, 1),
        lambda: [4001],
        forwarded,
        lambda: {own, "127.0.0.1"},
        VirtualWorld(),
        None,
    )
    reach._weigh([Told(peer, each) for peer, each in zip(PEERS, answers, strict=False)])
    return reach


def test_an_own_address_that_answers_is_public() -> None:
    reach = concluded(Answer(OUT, 5555, [4001]), own=OUT)
    assert (reach.state, reach.wants_relay, reach.outside) == (Reachability.PUBLIC, False, [])


def test_an_own_address_behind_a_firewall_is_not_public() -> None:
    reach = concluded(Answer(OUT, 5555, []), Answer(OUT, 5556, []), own=OUT)
    assert (reach.state, reach.wants_relay) == (Reachability.RELAY_ONLY, True)


def test_a_forwarded_port_that_answers_is_mapped() -> None:
    reach = concluded(Answer(OUT, 5555, [14001]), forwarded=(14001,))
    assert (reach.state, reach.wants_relay) == (Reachability.MAPPED, False)


def test_a_port_that_only_dialling_opened_is_announced_and_a_relay_wanted() -> None:
    reach = concluded(Answer(OUT, 34001, [34001]), Answer(OUT, 34001, [34001]))
    assert (reach.state, reach.wants_relay) == (Reachability.PUNCHED, True)
    assert reach.outside == reach.seen == [(OUT, 34001)]


def test_ipv6_alone_still_wants_a_relay_for_ipv4() -> None:
    reach = concluded(Answer("2600:1::2", 4001, [4001]), own="2600:1::2")
    assert (reach.state, reach.wants_relay) == (Reachability.PUBLIC, True)


def test_one_liar_among_several_makes_a_peer_announce_nobody() -> None:
    liar = Answer("9.9.9.9", 443, [4001])
    reach = concluded(liar, Answer(OUT, 4001, [4001]), Answer(OUT, 4001, [4001]))
    assert reach.outside == [(OUT, 4001)]


# --- addresses that a user announces -------------------------------------------------------------


def check(*addresses: str, bulk: tuple[str, ...] = (), detected: bool = True) -> Announced:
    return announced(addresses, bulk, detected=detected, peer=ALICE.peer_id)


def test_announced_addresses_are_kept() -> None:
    given_ = check(
        f"/ip4/8.8.8.8/tcp/14001/p2p/{ALICE.peer_id}",
        "/dns4/gpu.example.org/tcp/4001",
        bulk=("http://8.8.8.8:14002",),
    )
    assert given_.addresses == ("/ip4/8.8.8.8/tcp/14001", "/dns4/gpu.example.org/tcp/4001")
    assert given_.ports() == [14001, 4001]


@pytest.mark.parametrize(
    "address",
    [
        "gpu.example.org:4001",
        "/ip4/8.8.8.8/udp/4001",
        "/ip4/0.0.0.0/tcp/4001",
        "/ip6/::/tcp/4001",
        "/ip4/8.8.8.8/tcp/0",
        f"/ip4/8.8.8.8/tcp/4001/p2p/{BOB.peer_id}",
        f"/ip4/8.8.8.8/tcp/4001/p2p/{BOB.peer_id}/p2p-circuit",
    ],
)
def test_nonsense_is_one_sentence(address: str) -> None:
    with pytest.raises(UserError) as error:
        check(address)
    assert address in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("announce")


@pytest.mark.parametrize(
    "root",
    [
        "8.8.8.8:4002",
        "http://8.8.8.8",
        "ftp://8.8.8.8:1",
        "https://a:1",
        "http://8.8.8.8:0",
        "http://0.0.0.0:4002",
        "http://[::]:4002",
        "http://8.8.8.8:4002/?x=y",
    ],
)
def test_a_wrong_root_is_one_sentence(root: str) -> None:
    with pytest.raises(UserError, match="announce_bulk has"):
        check(bulk=(root,))


def test_a_peer_that_announces_nothing_is_told() -> None:
    with pytest.raises(UserError, match="nobody would find this peer"):
        check(detected=False)


async def test_announced_addresses_come_before_or_instead_of_detected_ones(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        peers = Peers(stack, tmp_path)
        address = f"/ip4/8.8.8.8/tcp/14001/p2p/{ALICE.peer_id}"
        for detected in (True, False):
            given_ = check(address, bulk=("http://8.8.8.8:14002",), detected=detected)
            alice = await peers.open(ALICE, announced=given_)
            assert alice.addresses()[0] == address
            assert (len(alice.addresses()) > 1) == detected
            assert alice.bulk_addresses()[0] == "http://8.8.8.8:14002"
            assert (len(alice.bulk_addresses()) > 1) == detected
            assert 14001 in alice.reach._asked_ports()


@given(st.text(max_size=60))
def test_no_text_breaks_the_order_of_addresses(text: str) -> None:
    assert may_be_global(text) in (True, False)
    assert may_be_global("/dns4/example.org/tcp/1")
    assert not may_be_global("/ip4/192.168.1.2/tcp/1")
