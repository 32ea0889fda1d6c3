from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Container
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarm.events import Events
from swarm.shardcast import limits
from swarm.shardcast.have import announcing, claims
from swarm.shardcast.have import streams as exchange
from swarm.shardcast.have.claims import PROTOCOL, Claim
from swarm.shardcast.have.streams import HaveExchange
from swarm.shardcast.uploads import Uploads
from swarm.transport import Stream
from swarm.wire.identity import PeerId
from tests.memory_network import MemoryNetwork
from tests.shardcast.harness import Peer, peer, peers
from tests.worlds import VirtualWorld

SIZE = limits.PIECE_BYTES_MIN


def files(pieces: int, seed: int = 0) -> dict[str, bytes]:
    return {"model.safetensors": random.Random(seed).randbytes(pieces * SIZE)}


def has(listener: Peer, speaker: Peer, manifest: bytes, count: int) -> list[int]:
    assert listener.have is not None
    claim = listener.have.claims.of(speaker.transport.peer_id, manifest)
    return [] if claim is None else [index for index in range(count) if claim.has(index)]


@asynccontextmanager
async def trainer_relay_client() -> AsyncIterator[tuple[Peer, Peer, Peer]]:
    """Three peers that are not connected; two of them speak of their pieces."""
    network = MemoryNetwork()
    async with (
        peer(network, 1) as trainer,
        peer(network, 2, have=True) as relay,
        peer(network, 3, have=True) as client,
    ):
        yield trainer, relay, client


def hide(server: Peer, hidden: Callable[[PeerId], Container[bytes]]) -> None:
    """From now on a peer knows nothing of the pieces with these digests when another asks."""
    serve = server.service.open
    server.service.open = lambda who, digest: serve(  # type: ignore[assignment, method-assign]
        who,
        b"unknown" if digest in hidden(who) else digest,  # type: ignore[arg-type]
    )


@given(st.sets(st.integers(0, 500)))
def test_a_claim_holds_exactly_what_was_added(indices: set[int]) -> None:
    claim = Claim()
    for index in sorted(indices):
        claim.bits |= 1 << index
    assert {index for index in range(-1, 520) if claim.has(index)} == indices


async def test_a_neighbour_learns_what_is_there_and_what_comes() -> None:
    async with trainer_relay_client() as (trainer, relay, client):
        checkpoint = await trainer.publish(0, files(6))
        manifest = checkpoint.reference.digest
        assert client.have is not None
        pieces = trainer.store.held((0, 0)).manifest.pieces  # type: ignore[union-attr]
        hidden = {piece.digest for piece in pieces[2:]}
        hide(trainer, lambda _: hidden)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay.fetcher.fetch, checkpoint, lambda: [trainer.source])
            await trio.sleep(2)
            assert not client.have.claims.announces(relay.transport.peer_id)
            assert not await client.have.claims.wait_claimed(manifest, 1.0)
            await client.connect(relay)
            began = trio.current_time()
            assert await client.have.claims.wait_claimed(manifest, 1.0)
            assert trio.current_time() < began + 0.01
            assert client.have.claims.announces(relay.transport.peer_id)
            assert has(client, relay, manifest, 6) == [0, 1], "the first word comes at once"
            hidden.remove(pieces[2].digest)
            await trio.sleep(1.01 + announcing.BATCH_SECONDS)
            assert has(client, relay, manifest, 6) == [0, 1, 2]
            hidden.clear()
        await trio.sleep(0.05)
        assert has(client, relay, manifest, 6) == list(range(6)), "complete is said at once"
        await relay.store._remove(relay.store.held((0, 0)))  # type: ignore[arg-type]
        await trio.sleep(2 * announcing.BATCH_SECONDS)
        assert client.have.claims.of(relay.transport.peer_id, manifest) is None
        await relay.transport.disconnect(client.transport.peer_id)
        await trio.sleep(0.1)
        assert not client.have.claims.announces(relay.transport.peer_id)


@pytest.mark.parametrize("idle", [True, False])
async def test_news_waits_only_while_the_uplink_is_in_use(idle: bool) -> None:
    async with trainer_relay_client() as (trainer, relay, client), trio.open_nursery() as nursery:
        checkpoint = await trainer.publish(0, files(6))
        manifest = checkpoint.reference.digest
        pieces = trainer.store.held((0, 0)).manifest.pieces  # type: ignore[union-attr]
        hidden = {piece.digest for piece in pieces[2:]}
        hide(trainer, lambda _: hidden)
        assert relay.have is not None
        relay.have._announcer._idle = lambda: idle
        await client.connect(relay)
        nursery.start_soon(relay.fetcher.fetch, checkpoint, lambda: [trainer.source])
        await trio.sleep(1000)
        for index in (2, 3):  # the first at once, after so long
            hidden.remove(pieces[index].digest)
            await trio.sleep(12)
        assert has(client, relay, manifest, 6) == ([0, 1, 2, 3] if idle else [0, 1, 2])
        nursery.cancel_scope.cancel()


async def test_what_a_neighbour_lacks_by_now_follows_from_how_it_went_on() -> None:
    await trio.sleep(10)
    claim = Claim()
    claim.counted(10)
    await trio.sleep(10)
    assert claim.lacks(100, trio.current_time()) == 90, "nothing is known of its speed"
    claim.counted(30)
    assert claim.lacks(100, trio.current_time()) == 70
    await trio.sleep(15)
    assert claim.lacks(100, trio.current_time()) == pytest.approx(40)
    await trio.sleep(100)
    assert claim.lacks(100, trio.current_time()) == 0
    claim.counted(20)  # withdrawn, or a lie
    await trio.sleep(10)
    assert claim.lacks(100, trio.current_time()) == 80


async def test_a_peer_that_passes_nothing_on_hears_and_says_nothing() -> None:
    network = MemoryNetwork()
    async with peers(network, 2, have=True) as (relay, client):
        assert client.have is not None and relay.have is not None
        client.have._announcer.tells = lambda: False
        await client.connect(relay)
        checkpoint = await relay.publish(0, files(3))
        await client.fetcher.fetch(checkpoint, lambda: [relay.source])
        await trio.sleep(2 * announcing.BATCH_SECONDS)
        manifest = checkpoint.reference.digest
        assert has(client, relay, manifest, 3) == [0, 1, 2]
        assert relay.have.claims.announces(client.transport.peer_id)
        assert has(relay, client, manifest, 3) == []


async def test_a_peer_that_begins_or_ceases_to_pass_on_says_so() -> None:
    network = MemoryNetwork()
    async with peers(network, 2, have=True) as (turning, other):
        have, tells = turning.have, False
        assert have is not None and other.have is not None
        have._announcer.tells = lambda: tells
        made = [await turning.publish(step, files(3, seed=step)) for step in (0, 1)]
        manifests = [checkpoint.reference.digest for checkpoint in made]
        await turning.connect(other)
        await trio.sleep(1)
        for _ in range(2):
            assert other.have.claims.announces(turning.transport.peer_id)
            for manifest in manifests:
                assert other.have.claims.of(turning.transport.peer_id, manifest) is None
            tells = True
            have.tells_changed()
            await trio.sleep(0.1)
            for manifest in manifests:
                assert has(other, turning, manifest, 3) == [0, 1, 2]
            tells = False
            have.tells_changed()
            await trio.sleep(0.1)
        assert other.have.claims.of(turning.transport.peer_id, manifests[0]) is None


async def test_so_many_neighbours_are_told_and_a_lost_one_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "NEIGHBOURS_MAX", exchange.NEIGHBOURS)
    network = MemoryNetwork()
    async with peers(network, 13, have=True) as (hub, *others):
        await hub.connect(*others)
        checkpoint = await hub.publish(0, files(1))
        await trio.sleep(1)

        def told() -> list[Peer]:
            return [one for one in others if has(one, hub, checkpoint.reference.digest, 1)]

        first = told()
        assert len(first) == exchange.NEIGHBOURS
        await hub.transport.disconnect(first[0].transport.peer_id)
        await trio.sleep(1)
        assert len(told()) == exchange.NEIGHBOURS
        assert first[0] not in told()


@pytest.mark.parametrize("tells", [True, False])
async def test_who_is_late_or_feeds_others_looks_for_more_neighbours(tells: bool) -> None:
    network, world = MemoryNetwork(), VirtualWorld(1)
    told: set[PeerId] = set()
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(peer(network, 1))
        for number in range(2, 2 + 2 * exchange.NEIGHBOURS_LATE):
            other = await stack.enter_async_context(peer(network, number))

            async def listen(stream: Stream, peer_id: PeerId = other.transport.peer_id) -> None:
                told.add(peer_id)
                while await stream.receive() is not None:
                    pass

            other.transport.serve(PROTOCOL, listen)
            await hub.connect(other)
        uploads = Uploads(world, hub.transport, hub.store)
        have = HaveExchange(
            world,
            hub.transport,
            hub.store,
            Events(world, hub.transport.peer_id),
            uploads=uploads,
            tells=lambda: tells,
        )
        nursery = await stack.enter_async_context(trio.open_nursery())
        await nursery.start(have.run)
        await hub.publish(0, files(exchange.GROW_PIECES))
        await trio.sleep(100 * exchange.SATED_SECONDS)
        assert len(told) == exchange.NEIGHBOURS
        have.late = True
        await trio.sleep(100 * exchange.SATED_SECONDS)
        assert len(told) == exchange.NEIGHBOURS_LATE
        uploads.bytes_per_second = 20 * exchange.NEIGHBOUR_BYTES_PER_SECOND
        await trio.sleep(100 * exchange.SATED_SECONDS)
        assert len(told) == (20 if tells else exchange.NEIGHBOURS_LATE)
        nursery.cancel_scope.cancel()


NAME = b"x" * 32


@pytest.mark.parametrize(
    ("frame", "mended"),
    [
        ("no array", []),
        ([["bitmap", b"x" * 31, b""]], [["bitmap", NAME, b""]]),
        ([["bitmap", NAME, bytes(8193)]], [["bitmap", NAME, bytes(8192)]]),
        ([["pieces", NAME, [65536], 1]], [["pieces", NAME, [65535], 1]]),
        ([["pieces", NAME, [-1], 1]], [["pieces", NAME, [0], 1]]),
        ([["pieces", NAME, [0] * 4097, 1]], [["pieces", NAME, [0] * 4096, 1]]),
        ([["pieces", NAME, [0], -1]], [["pieces", NAME, [], 0]]),
        ([["pieces", NAME, [0], 65537]], [["pieces", NAME, [0], 65536]]),
        ([["pieces", NAME, [0]]], [["pieces", NAME, [0], 1]]),
        ([["complete", NAME]] * 17, [["complete", NAME]] * 16),
        ([["steal", NAME]], [["gone", NAME]]),
    ],
)
async def test_a_hostile_frame_ends_the_stream_and_is_forgotten(
    frame: object, mended: object
) -> None:
    network = MemoryNetwork()
    async with peer(network, 1) as liar, peer(network, 2, have=True) as listener:
        await liar.connect(listener)
        stream = await liar.transport.open_stream(listener.transport.peer_id, PROTOCOL)
        await stream.send(msgspec.msgpack.encode([["complete", b"c" * 32]]))
        await stream.send(msgspec.msgpack.encode(mended))
        await trio.sleep(1)
        assert has(listener, liar, b"c" * 32, 1) == [0]
        await stream.send(msgspec.msgpack.encode(frame))
        await trio.sleep(1)
        assert listener.have is not None
        assert not listener.have.claims.announces(liar.transport.peer_id)
        (event,) = listener.events.named("shardcast.neighbour_silent")
        assert event.fields["remote"] == liar.transport.peer_id


async def test_no_msgpack_ends_the_stream_too() -> None:
    network = MemoryNetwork()
    async with peer(network, 1) as liar, peer(network, 2, have=True) as listener:
        await liar.connect(listener)
        stream = await liar.transport.open_stream(listener.transport.peer_id, PROTOCOL)
        await stream.send(b"\xc1")
        await trio.sleep(1)
        assert listener.have is not None
        assert not listener.have.claims.announces(liar.transport.peer_id)
        assert listener.events.named("shardcast.neighbour_silent")


async def test_named_pieces_are_added_to_those_claimed_before() -> None:
    network = MemoryNetwork()
    async with peer(network, 1) as speaker, peer(network, 2, have=True) as listener:
        await speaker.connect(listener)
        stream = await speaker.transport.open_stream(listener.transport.peer_id, PROTOCOL)
        await stream.send(msgspec.msgpack.encode([["bitmap", NAME, b"\x05"]]))
        for indices in ([], [65535], [9, 1, 9, 2], [0]):
            await stream.send(msgspec.msgpack.encode([["pieces", NAME, indices, 7]]))
        await trio.sleep(1)
        assert has(listener, speaker, NAME, 65536) == [0, 1, 2, 9, 65535]


async def test_what_is_remembered_of_a_neighbour_is_bounded() -> None:
    network = MemoryNetwork()
    async with peer(network, 1) as liar, peer(network, 2, have=True) as listener:
        await liar.connect(listener)
        stream = await liar.transport.open_stream(listener.transport.peer_id, PROTOCOL)
        started = trio.current_time()
        for number in range(200):
            entry = ["bitmap", number.to_bytes(32, "big"), b"\xff" * 8192]
            await stream.send(msgspec.msgpack.encode([entry]))
        await trio.sleep(10)
        assert listener.have is not None
        held = listener.have.claims._claims[liar.transport.peer_id]
        assert len(held) == 16  # of as many pieces as a checkpoint can have
        assert next(reversed(held)) == (199).to_bytes(32, "big")
        assert trio.current_time() - started > 1.0
        for number in range(300):
            complete = claims.Complete(number.to_bytes(32, "big"))
            await stream.send(claims.encode([complete]))
        await trio.sleep(10)
        assert len(held) == claims.CLAIMS_MAX


async def test_of_two_streams_of_one_peer_the_newer_counts() -> None:
    network = MemoryNetwork()
    ours, theirs = b"d" * 32, b"e" * 32
    async with peer(network, 1) as liar, peer(network, 2, have=True) as listener:
        await liar.connect(listener)
        have = listener.have
        assert have is not None

        async def claiming(pieces: bytes) -> Stream:
            stream = await liar.transport.open_stream(listener.transport.peer_id, PROTOCOL)
            await stream.send(msgspec.msgpack.encode([["bitmap", ours, pieces]]))
            return stream

        more = msgspec.msgpack.encode([["bitmap", theirs, b"\xff"]])
        gone = msgspec.msgpack.encode([["gone", ours]])
        for moment in range(20):  # between the older one's word and the newer one's beginning
            older = await claiming(b"\x0f")
            await trio.sleep(0.1)
            await older.send(more)
            for _ in range(moment):
                await trio.lowlevel.checkpoint()
            newer = await claiming(b"\x06")
            await trio.sleep(0.1)
            await older.send(gone)
            await trio.sleep(0.1)
            assert has(listener, liar, ours, 8) == [1, 2]
            assert have.claims.of(liar.transport.peer_id, theirs) is None
            assert have.claims.rarest(ours, 0b1111) == 0b1001
            with trio.fail_after(5):
                assert await older.receive() is None, "the older stream is ended"
            await newer.end()
            await older.end()
            await trio.sleep(0.1)
            assert not have.claims.announces(liar.transport.peer_id)
            assert not have.claims._rarity
            assert not have._listening
