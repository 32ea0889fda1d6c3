"""Which way a blob takes to a peer on libp2p, when some of its addresses lead nowhere."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from swarm.transport import FetchError, Source
from swarm.transport.http import client, limits
from swarm.transport.libp2p import pieces

from .harness import ALICE, BOB, Network, Service, Sink

DATA = bytes(range(256)) * 1000


class Hole:
    """An address that takes connections and says nothing."""

    def __init__(self) -> None:
        self.root = ""
        self.connections = 0

    async def swallow(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        await trio.sleep_forever()


@asynccontextmanager
async def holes(count: int) -> AsyncIterator[list[Hole]]:
    async with trio.open_nursery() as nursery:
        opened = [Hole() for _ in range(count)]
        for hole in opened:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            hole.root = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
            nursery.start_soon(trio.serve_listeners, hole.swallow, listeners)
        yield opened
        nursery.cancel_scope.cancel()


@pytest.fixture
def network(tmp_path, monkeypatch) -> Network:
    monkeypatch.setattr(limits, "CONNECT_SECONDS", 0.4)
    monkeypatch.setattr(pieces, "CONNECT_SECONDS_MIN", 0.1)
    return Network("libp2p", tmp_path)


@pytest.mark.parametrize("how", ["fetch", "run", "push"])
async def test_addresses_that_lead_nowhere_cost_little_and_once(network: Network, how: str) -> None:
    """The connection carries the blobs, long before a piece's deadline."""
    async with network.pair() as (alice, bob), holes(3) as nowhere:
        service = Service()
        bob.transport.serve_bulk(service)
        reference = service.offer(bob.disk, DATA)
        mine = alice.disk.put("mine", DATA)
        source = Source(bob.id, tuple(hole.root for hole in nowhere))

        async def ask() -> None:
            sinks = [Sink(len(DATA)) for _ in range(3)]
            arrived = []

            async def take(piece) -> None:
                arrived.append(piece.verify(reference.digest))

            if how == "push":
                await alice.transport.push(source, mine, "mine")
                return
            if how == "fetch":
                await take(await alice.transport.fetch(source, reference, sinks[0]))
            else:
                wanted = [(reference, sink) for sink in sinks]
                await alice.transport.fetch_run(source, wanted, take)
            assert arrived == [True] * len(arrived) != []

        began = trio.current_time()
        for _ in range(3):
            await ask()
        assert trio.current_time() - began < 4 * limits.CONNECT_SECONDS
        assert [hole.connections for hole in nowhere] == [1, 1, 1]


async def test_a_port_that_drops_everything_is_left_for_the_connection(
    network: Network, monkeypatch
) -> None:
    """Its queue of connections is full: it does not even answer that."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        async with network.pair() as (alice, bob):
            service = Service()
            bob.transport.serve_bulk(service)
            reference = service.offer(bob.disk, DATA)
            source = Source(bob.id, (f"http://127.0.0.1:{address[1]}",))
            began = trio.current_time()
            piece = await alice.transport.fetch(source, reference, Sink(len(DATA)))
            assert piece.verify(reference.digest)
            assert trio.current_time() - began >= limits.CONNECT_SECONDS
            monkeypatch.setattr(limits, "CONNECT_SECONDS", 3600.0)  # not once more
            await alice.transport.fetch(source, reference, Sink(len(DATA)))
        for one in waiting:
            one.close()


async def test_another_address_has_its_turn_first(network: Network) -> None:
    async with network.pair() as (alice, bob), holes(1) as nowhere:
        service = Service()
        bob.transport.serve_bulk(service)
        reference = service.offer(bob.disk, DATA)
        source = Source(bob.id, (nowhere[0].root, *bob.transport.bulk_addresses()))
        for _ in range(2):
            await alice.transport.fetch(source, reference, Sink(len(DATA)))
        assert nowhere[0].connections == 1
        assert service.asked == [(alice.id, b"")], "both over HTTP, on one connection"


async def test_an_address_is_tried_again_without_another_way_and_after_a_while(
    network: Network, monkeypatch
) -> None:
    monkeypatch.setattr(limits, "CONNECT_SECONDS", 0.1)
    async with network.peer(ALICE) as alice, network.peer(BOB) as bob, holes(1) as nowhere:
        service = Service()
        bob.transport.serve_bulk(service)
        reference = service.offer(bob.disk, DATA)
        source = Source(bob.id, (nowhere[0].root,))

        async def fetch() -> int:
            """Connections to the hole so far."""
            await alice.transport.fetch(source, reference, Sink(len(DATA)))
            return nowhere[0].connections

        for tried in (1, 2):  # there is no connection to Bob
            with pytest.raises(FetchError, match="no answer in time"):
                await fetch()
            assert nowhere[0].connections == tried
        await alice.transport.connect(bob.id, bob.transport.addresses())
        assert await fetch() == 3, "who comes back may have been reached again"
        assert await fetch() == 3
        monkeypatch.setattr(client, "UNREACHABLE_SECONDS", 0.0)
        assert await fetch() == 4
