"""Connections of the piece port: strangers and crowds of admitted identities shut nobody out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from swarm.transport import BlobReference, FetchError, Source
from swarm.transport.http import limits, server
from swarm.transport.http.serving import Table
from swarm.transport.room import NoRoom, Origin, Sizes, origin_of
from swarm.wire.identity import Identity, PeerId

from .harness import ALICE, BOB, CAROL, FolderDisk, Network, Service, Sink
from .test_http import client_of, dial, fetch, prove, serving

pytestmark = pytest.mark.wall_clock

DATA = bytes(range(256)) * 1000
LONG = bytes(32 << 20)
"""More than the buffers of a connection hold."""

CROWD = [Identity(bytes([100 + n]) * 32) for n in range(8)]


@dataclass
class Port:
    """The piece port of Bob, and how others use it."""

    root: str
    service: Service
    disk: FolderDisk
    stack: AsyncExitStack

    async def dial(self, source: str = "127.0.0.1") -> trio.SocketStream:
        """Connect from an address of the loopback network, until the test ends."""
        return await self.stack.enter_async_context(await dial(self.root, source))

    async def prove(self, identity: Identity, source: str = "127.0.0.1") -> trio.SocketStream:
        """Connect and prove an identity; raises `AssertionError` if it is refused."""
        stream = await self.dial(source)
        assert b" 204 " in await prove(stream, identity)
        return stream

    async def fetch(self, identity: Identity = ALICE) -> None:
        """Fetch a blob as a peer does."""
        reference = self.service.offer(self.disk, DATA, "served")
        async with client_of(self.disk, identity) as client:
            piece = await fetch(client, self.root, BOB.peer_id, reference, Sink(len(DATA)))
            assert piece.verify(reference.digest)


@asynccontextmanager
async def port_of(
    disk: FolderDisk, trusts: Callable[[PeerId], bool] = lambda peer: False
) -> AsyncIterator[Port]:
    service = Service()
    service.admitted = {each.peer_id for each in (ALICE, CAROL, *CROWD)}
    async with serving(service, disk, trusts=trusts) as root, AsyncExitStack() as stack:
        yield Port(root, service, disk, stack)


async def start_long(port: Port, stream: trio.SocketStream) -> None:
    """Ask for a long blob, and read its beginning only."""
    reference = port.service.offer(port.disk, LONG, "long")
    await stream.send_all(
        b"GET /blob/%s HTTP/1.1\r\nhost: x\r\n\r\n" % reference.digest.hex().encode()
    )
    assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


async def ended(stream: trio.SocketStream) -> bool:
    """Whether the other side has closed a connection; false if that takes long."""
    with trio.move_on_after(5):
        try:
            while await stream.receive_some():
                pass
        except trio.BrokenResourceError:
            return True
        return True
    return False


# --- strangers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sources", [[f"127.0.1.{n}" for n in range(1, 9)], ["127.0.0.1"]])
async def test_silent_strangers_make_way(disk, monkeypatch, sources: list[str]) -> None:
    """From eight addresses of one network, or from behind the honest peer's own."""
    monkeypatch.setattr(server, "CONNECTIONS_OF_STRANGERS_MAX", 16)
    monkeypatch.setattr(server, "CONNECTIONS_PER_ADDRESS_MAX", 16 // len(sources))
    monkeypatch.setattr(limits, "GRACE_SECONDS", 0.0)
    async with port_of(disk) as port:
        silent = [await port.dial(sources[n % len(sources)]) for n in range(16)]
        await trio.testing.wait_all_tasks_blocked(0.01)
        for _ in range(4):
            await port.fetch()
        assert await ended(silent[0]), "the oldest made way"


@pytest.mark.parametrize("first", [b"", b"GET /chall", b"POST /admission HTTP/1.1\r\nhost: x\r\n"])
async def test_a_head_comes_within_seconds_or_never(disk, monkeypatch, first: bytes) -> None:
    """Not within a minute of silence, nor ten seconds after each first byte."""
    assert limits.STRANGER_SECONDS <= 5 < limits.HEAD_SECONDS < limits.IDLE_SECONDS
    monkeypatch.setattr(limits, "STRANGER_SECONDS", 0.05)
    async with port_of(disk) as port:
        stream = await port.dial()
        if first:
            await stream.send_all(first)
        assert await ended(stream)
        known = await port.prove(ALICE)
        await trio.sleep(0.1)  # a peer that proved itself may rest for longer
        await start_long(port, known)


async def test_a_body_of_a_proof_that_does_not_come_is_no_longer_waited_for(
    disk, monkeypatch
) -> None:
    monkeypatch.setattr(limits, "STRANGER_SECONDS", 0.05)
    async with port_of(disk) as port:
        stream = await port.dial()
        await stream.send_all(b"POST /admission HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1")
        assert await ended(stream)


async def test_handshakes_of_a_crowd_make_way_for_one_from_elsewhere(disk, monkeypatch) -> None:
    """Also while all are too young to be idle."""
    monkeypatch.setattr(server, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(limits, "GRACE_SECONDS", 3600.0)
    async with port_of(disk) as port:
        honest = await port.dial("127.0.0.1")
        silent = [await port.dial(f"127.0.1.{n}") for n in range(1, 9)]
        for each in silent[:5]:
            assert await ended(each)
        assert b" 204 " in await prove(honest, ALICE)


# --- admitted identities -----------------------------------------------------------------------


@pytest.fixture
def eight(monkeypatch) -> None:
    """Room for eight connections, of which six may be of admitted peers, two of each."""
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(server, "CONNECTIONS_PER_PEER_MAX", 2)
    monkeypatch.setattr(server, "CONNECTIONS_FOR_STRANGERS", 2)
    monkeypatch.setattr(limits, "GRACE_SECONDS", 0.0)


async def test_a_crowd_of_admitted_identities_at_work_leaves_others_their_share(
    disk, eight
) -> None:
    async with port_of(disk) as port:
        for n in range(6):
            await start_long(port, await port.prove(CROWD[n // 2], "127.0.1.1"))
        alone = await port.prove(ALICE, "127.0.2.1")
        await start_long(port, alone)
        await port.fetch(CAROL)
        rest = await alone.receive_some()
        assert rest, "who came from elsewhere stays"


async def test_one_peer_has_so_many_connections_of_which_an_idle_one_makes_way(disk, eight) -> None:
    async with port_of(disk) as port:
        first, second = [await port.prove(ALICE) for _ in range(2)]
        await start_long(port, first)
        third = await port.prove(ALICE)
        assert await ended(second)
        await start_long(port, third)
        assert b"too many connections of this peer" in await prove(await port.dial(), ALICE)


async def test_nobody_takes_the_place_of_a_trusted_peer(disk, eight) -> None:
    async with port_of(disk, lambda peer: peer == CAROL.peer_id) as port:
        trusted = [await port.prove(CAROL, "127.0.1.1") for _ in range(2)]
        for n in range(4):
            await start_long(port, await port.prove(CROWD[n], "127.0.1.1"))
        for n in range(4, 8):
            with contextlib.suppress(AssertionError):
                await start_long(port, await port.prove(CROWD[n], f"127.0.{n}.1"))
        for each in trusted:
            await start_long(port, each)


async def test_a_trusted_peer_takes_the_place_of_one_at_work(disk, eight) -> None:
    async with port_of(disk, lambda peer: peer == CAROL.peer_id) as port:
        for n in range(6):
            await start_long(port, await port.prove(CROWD[n], f"127.0.{n}.1"))
        await port.fetch(CAROL)


# --- the table alone ---------------------------------------------------------------------------


@dataclass(eq=False)
class Guest:
    host: str
    peer: str = ""
    trusted: bool = False
    idle: bool = False
    used_at: float = 0.0
    leaving: bool = False

    @property
    def origin(self) -> Origin:
        return origin_of(self.host)

    @property
    def vouched(self) -> bool:
        return bool(self.peer)

    def leave(self) -> None:
        self.leaving = True


def let_prove(table: Table, guest: Guest, peer: str) -> None:
    guest.peer = peer
    try:
        table.prove(guest)
    except NoRoom:
        guest.peer = ""
        raise


SIZES = Sizes(
    connections=40,
    strangers=16,
    for_strangers=4,
    per_address=8,
    handshakes=16,
    handshakes_per_second=1e6,
    handshakes_burst=1e6,
)
PER_PEER = 4
HOSTS = st.sampled_from(
    [f"198.51.{net}.{n}" for net in range(3) for n in range(3)]
    + [f"2001:db8:{net}:{n}::{m}" for net in range(2) for n in range(2) for m in range(3)]
)


@given(st.lists(st.tuples(HOSTS, st.integers(0, 60), st.booleans()), max_size=400))
def test_whoever_was_there_before_an_admitted_peer_from_elsewhere_gets_in(arrivals) -> None:
    """However strangers and admitted identities of five networks filled the table."""

    async def main() -> None:
        table = Table(SIZES, PER_PEER)
        with contextlib.ExitStack() as stack:
            guests: list[Guest] = []
            for now, (host, peer, idle) in enumerate(arrivals):
                guest = Guest(host, used_at=now)
                with contextlib.suppress(NoRoom):
                    stack.enter_context(table.entered(guest, host))
                    guests.append(guest)
                    guest.idle = idle
                    if peer:
                        let_prove(table, guest, f"peer {peer}")
            strangers = [g for g in guests if not g.peer and not g.leaving]
            known = [g for g in guests if g.peer and not g.leaving]
            assert len(strangers) <= SIZES.strangers
            assert len(known) <= SIZES.connections - SIZES.for_strangers
            newcomer = Guest("203.0.113.1")
            with table.entered(newcomer, newcomer.host):
                let_prove(table, newcomer, "newcomer")
                assert not newcomer.leaving

    trio.run(main)


@contextlib.contextmanager
def entered(table: Table, hosts: list[str]) -> Iterator[list[Guest]]:
    with contextlib.ExitStack() as stack:
        guests = [Guest(host) for host in hosts]
        for guest in guests:
            stack.enter_context(table.entered(guest, guest.host))
        yield guests


async def test_a_network_connects_so_often_without_a_proof() -> None:
    """Proofs give their turn back: a lab behind one address may connect as often as it likes."""
    sizes = dataclasses.replace(SIZES, handshakes_per_second=1e-9, handshakes_burst=3.0)
    table = Table(sizes, PER_PEER)
    for n in range(9):
        guest = Guest(f"192.0.2.{n}")
        with table.entered(guest, guest.host):
            let_prove(table, guest, "a peer")
    for n in range(3):
        with table.entered(Guest(f"192.0.2.{n}"), f"192.0.2.{n}"):
            pass
    with pytest.raises(NoRoom, match="often"), table.entered(Guest("192.0.2.9"), "192.0.2.9"):
        pass


# --- a full server is tried over a stream ------------------------------------------------------


@asynccontextmanager
async def full_port(answer: bytes) -> AsyncIterator[str]:
    """A port that gives one answer to whatever it is asked; its root."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def refuse(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(answer)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, refuse, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


FULL = b"HTTP/1.1 503 Refused\r\nconnection: close\r\n\r\ntoo many connections"


@pytest.mark.parametrize("how", ["fetch", "push"])
@pytest.mark.parametrize("answer", [FULL, b""])
async def test_what_a_full_port_refuses_comes_over_a_stream(
    tmp_path, how: str, answer: bytes
) -> None:
    network = Network("libp2p", tmp_path)
    async with network.pair() as (alice, bob), full_port(answer) as root:
        service = Service()
        bob.transport.serve_bulk(service)
        source = Source(bob.id, (root,))
        for _ in range(2):
            if how == "fetch":
                reference = service.offer(bob.disk, DATA)
                sink = Sink(len(DATA))
                piece = await alice.transport.fetch(source, reference, sink)
                assert piece.verify(reference.digest)
            else:
                reference = alice.disk.put("mine", DATA)
                await alice.transport.push(source, reference, "mine")
                assert service.pushed == {reference.digest: DATA}


async def test_a_peers_own_connections_beyond_its_bound_are_streams(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_PER_PEER_MAX", 0)
    network = Network("libp2p", tmp_path)
    async with network.pair() as (alice, bob):
        service = Service()
        bob.transport.serve_bulk(service)
        reference = service.offer(bob.disk, DATA)
        source = Source(bob.id, tuple(bob.transport.bulk_addresses()))
        piece = await alice.transport.fetch(source, reference, Sink(len(DATA)))
        assert piece.verify(reference.digest)


async def test_a_full_port_without_a_connection_is_busy_and_no_fault_of_the_source(
    tmp_path,
) -> None:
    network = Network("libp2p", tmp_path)
    async with network.peer(ALICE) as alice, full_port(FULL) as root:
        with pytest.raises(FetchError, match="503") as caught:
            wanted = BlobReference(b"?" * 32, 5)
            await alice.transport.fetch(Source(BOB.peer_id, (root,)), wanted, Sink(5))
        assert caught.value.busy
