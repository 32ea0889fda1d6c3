"""Strangers who break the rules below our own protocols; real sockets on loopback."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trio.testing

from swarm.events import STRANGERS_EVENTS_PER_MINUTE, Event, Events
from swarm.transport import Stream, limits, room
from swarm.transport.libp2p import connections, open_libp2p
from swarm.transport.libp2p.guard import Guard
from swarm.transport.libp2p.yamux import WINDOW_BYTES
from swarm.wire.identity import Identity
from tests.worlds import VirtualWorld

from . import attacks
from .harness import ALICE, BOB, CAROL, MALLORY, FolderDisk
from .hostile import DATA, MULTISTREAM, RST, SYN, connected, data, name, opening, tcp

pytestmark = pytest.mark.wall_clock

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
ECHO = "/swarm/echo/1.0.0"


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


@asynccontextmanager
async def host(tmp_path, identity=BOB, **options):
    """A relay that also serves an echo."""
    options = {"relay": True, **options}
    async with open_libp2p(
        identity, LOOPBACK, world=VirtualWorld(), disk=FolderDisk(tmp_path), **options
    ) as transport:
        transport.serve(ECHO, echo)
        yield transport


async def is_answered(bob, tmp_path) -> None:
    """An honest peer connects and is served."""
    async with open_libp2p(ALICE, [], world=VirtualWorld(), disk=FolderDisk(tmp_path)) as alice:
        await alice.connect(BOB.peer_id, bob.addresses())
        stream = await alice.open_stream(BOB.peer_id, ECHO)
        await stream.send(b"still there?")
        assert await stream.receive() == b"still there?"
        await stream.end()


async def test_a_protocol_name_that_is_no_text_ends_its_stream_alone(tmp_path) -> None:
    """It ended the whole process: libp2p lets `UnicodeDecodeError` through."""
    async with host(tmp_path) as bob:
        async with connected(bob.addresses()[0], MALLORY) as mallory:
            await mallory.send(data(1, MULTISTREAM + name(b"\xff\xfe\xfd"), SYN))
            with trio.move_on_after(0.5):
                await mallory.drain()
        await is_answered(bob, tmp_path)


async def test_what_a_stream_raises_is_contained_and_told(tmp_path) -> None:
    told: list[Event] = []
    events = Events(VirtualWorld(), BOB.peer_id)
    events.add_sink(told.append)

    async def broken(stream) -> None:
        raise KeyError("libp2p did not expect this")

    async with host(tmp_path, events=events) as bob:
        bob._host.set_stream_handler("/broken", broken)
        async with connected(bob.addresses()[0], MALLORY) as mallory:
            await mallory.send(opening(1, "/broken"))
            while (await mallory.receive())[1:3] != (RST, 1):
                pass
        await is_answered(bob, tmp_path)
    (event,) = told
    assert event.name == "transport.contained"
    assert event.fields["remote"] == MALLORY.peer_id
    assert "libp2p did not expect this" in event.fields["reason"]


def test_a_guard_contains_errors_and_never_a_cancellation() -> None:
    async def fails() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("while it is cancelled")

    async def undo() -> None:
        undone.append(True)

    async def main() -> None:
        told: list[Event] = []
        events = Events(VirtualWorld(), BOB.peer_id)
        events.add_sink(told.append)
        guard = Guard(events)
        with trio.move_on_after(0) as scope:
            await guard.run("stream", MALLORY.peer_id, fails, undo)
            await trio.sleep_forever()
        assert scope.cancelled_caught
        for _ in range(2 * STRANGERS_EVENTS_PER_MINUTE):
            guard.tell("stream", MALLORY.peer_id, "again")
        assert len(told) == STRANGERS_EVENTS_PER_MINUTE
        await trio.sleep(60)
        guard.tell("stream", MALLORY.peer_id, "again")
        assert told[-1].fields["untold"] == STRANGERS_EVENTS_PER_MINUTE + 1

    undone: list[bool] = []
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert undone


async def test_nothing_is_kept_of_those_who_came_and_went(tmp_path) -> None:
    async with host(tmp_path) as bob:
        seen = bob.connection_events()
        for n in range(10, 20):
            key = Identity(bytes([n]) * 32)
            async with connected(bob.addresses()[0], key) as stranger:
                await stranger.send(opening(1, "/ipfs/ping/1.0.0") + data(1, bytes(32)))
                while (await stranger.receive())[0] != DATA:
                    pass
        events = [await seen.receive() for _ in range(20)]
        assert not events[-1].connected
        assert not bob._swarm.connections
        assert bob._swarm.peerstore.peer_data_map.keys() == {bob._swarm.get_peer_id()}
        assert not bob._holding


async def test_whoever_has_the_same_key_is_no_other_peer(tmp_path) -> None:
    async with host(tmp_path) as bob:
        async with connected(bob.addresses()[0], BOB) as twin:
            await twin.drain()
        assert bob.connected() == []
        await is_answered(bob, tmp_path)


async def test_libp2ps_own_protocols_are_served_on_so_many_streams(tmp_path) -> None:
    async with host(tmp_path) as bob:
        async with connected(bob.addresses()[0], MALLORY) as mallory:
            most = connections.LIBP2P_STREAMS_PER_CONNECTION_MAX
            for n in range(most + 1):
                await mallory.send(opening(2 * n + 1, "/libp2p/circuit/relay/0.2.0/hop"))
            while (await mallory.receive())[1] != RST:
                pass  # one of them is too many
        await is_answered(bob, tmp_path)


@pytest.mark.slow
async def test_data_for_a_stream_whose_reader_lags_is_not_hoarded(tmp_path) -> None:
    """A relay went from 112 to 1,304 MB in 16 seconds: libp2p only logs an overrun window."""
    async with host(tmp_path) as bob:
        async with connected(bob.addresses()[0], MALLORY) as mallory, trio.open_nursery() as n:

            async def flood() -> None:
                await mallory.send(opening(1, "/ipfs/ping/1.0.0"))
                for _ in range(16 * WINDOW_BYTES // 65000):
                    await mallory.send(data(1, bytes(65000)))

            n.start_soon(flood)
            while (await mallory.receive())[1:3] != (RST, 1):
                pass
        await is_answered(bob, tmp_path)


async def test_a_full_house_has_room_for_who_comes_from_elsewhere(tmp_path, monkeypatch) -> None:
    """1,023 connections from 18 addresses shut newcomers out."""
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 6)
    monkeypatch.setattr(room, "CONNECTIONS_FOR_STRANGERS", 2)
    async with AsyncExitStack() as stack:
        bob = await stack.enter_async_context(host(tmp_path))
        opened = open_libp2p(CAROL, [], world=VirtualWorld(), disk=FolderDisk(tmp_path))
        carol = await stack.enter_async_context(opened)
        bob.vouch(CAROL.peer_id, 60)
        await carol.connect(BOB.peer_id, bob.addresses())
        for n in range(1, 11):  # each with a stream, so that none of them is idle
            stranger = connected(bob.addresses()[0], Identity(bytes([50 + n]) * 32), f"127.0.1.{n}")
            mallory = await stack.enter_async_context(stranger)
            await mallory.send(opening(1, ECHO))
            while (await mallory.receive())[0] != DATA:
                pass  # it is being served
            assert len(bob.connected()) <= 6
        await is_answered(bob, tmp_path)
        assert CAROL.peer_id in bob.connected()


async def test_strangers_who_never_finish_a_handshake_keep_nobody_out(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(room, "HANDSHAKES_MAX", 4)
    async with AsyncExitStack() as stack:
        bob = await stack.enter_async_context(host(tmp_path))
        silent = [
            await stack.enter_async_context(tcp(bob.addresses()[0], f"127.0.1.{n}"))
            for n in range(1, 9)
        ]
        await is_answered(bob, tmp_path)
        assert (await silent[0].receive_some(1024)).startswith(b"\x13/multistream")
        assert await silent[0].receive_some(1024) == b""  # it made way


@pytest.mark.parametrize("stage", attacks.CATALOGUE)
async def test_an_honest_peer_is_served_beside_every_attack(stage: str, tmp_path) -> None:
    async with AsyncExitStack() as stack:
        bob = await stack.enter_async_context(host(tmp_path))
        address = bob.addresses()[0]
        protocols = await attacks.served_protocols(address, MALLORY)
        assert {ECHO, "/ipfs/ping/1.0.0", "/libp2p/circuit/relay/0.2.0/hop"} <= {*protocols}
        opened = open_libp2p(ALICE, [], world=VirtualWorld(), disk=FolderDisk(tmp_path))
        alice = await stack.enter_async_context(opened)
        await alice.connect(BOB.peer_id, bob.addresses())
        stream = await alice.open_stream(BOB.peer_id, ECHO)
        for which in attacks.CATALOGUE[stage]:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attacks.attack, address, stage, which, MALLORY, protocols)
                for said in (b"beside", which.encode()):
                    await stream.send(said)
                    assert await stream.receive() == said, f"after {stage}: {which}"
        await alice.disconnect(BOB.peer_id)
        await is_answered(bob, tmp_path)
        assert bob._held_bytes == 0
