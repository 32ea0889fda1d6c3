"""Behaviour at the level of streams: generic nodes, hostile ones, silent ones."""

from __future__ import annotations

import pytest
import trio
from libp2p.kad_dht.pb import kademlia_pb2 as oracle

from swarm.kademlia import dht, wire
from swarm.kademlia.dht import INBOUND_IDLE_SECONDS
from swarm.kademlia.routing_table import CONTACT_FAILURES_MAX
from swarm.kademlia.wire import RECORD_BYTES_MAX, Message, MessageType
from swarm.transport import Stream, StreamError
from swarm.wire.identity import peer_id_bytes
from tests.kademlia.harness import Peer, closest, good, run, swarm

RUNNER = run

KEY = b"/swarm-run/alice/first"
PING = wire.encode(Message(MessageType.PING))


class GenericNode:
    """As little of a kad-dht node as the specification allows, on libp2p's protobuf classes."""

    def __init__(self, peer: Peer, *, closes_after_each: bool) -> None:
        self.streams = 0
        self.requests: list[str] = []
        self.values: dict[bytes, bytes] = {}
        self._peer = peer
        self._closes_after_each = closes_after_each
        peer.transport.serve(wire.PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        self.streams += 1
        while (frame := await stream.receive()) is not None:
            request = oracle.Message.FromString(frame)
            self.requests.append(oracle.Message.MessageType.Name(request.type))
            answer = oracle.Message(type=request.type, key=request.key, clusterLevelRaw=1)
            if request.type == oracle.Message.PUT_VALUE:
                self.values[request.record.key] = request.record.value
                answer.record.CopyFrom(request.record)
            elif request.type == oracle.Message.GET_VALUE and request.key in self.values:
                answer.record.key = request.key
                answer.record.value = self.values[request.key]
                answer.record.timeReceived = "2026-11-20T12:00:00Z"
            if request.type != oracle.Message.ADD_PROVIDER:
                await stream.send(answer.SerializeToString())
            if self._closes_after_each:
                return


@pytest.mark.parametrize("closes_after_each", [True, False])
async def test_a_generic_node_holds_records_however_it_treats_streams(closes_after_each):
    async with swarm() as net:
        peer = await net.start()
        other = await net.start(server=False)
        node = GenericNode(other, closes_after_each=closes_after_each)
        assert await peer.dht.bootstrap([other.address]) == 1
        assert peer.dht.table.contacts()[0].addresses == (other.address,)
        assert await peer.dht.put(KEY, good(1)) == 2
        node.values[KEY] = good(2)
        assert await peer.dht.get(KEY) == good(2)
        node.values[KEY] = good(1)
        assert await peer.dht.get(KEY) == good(2)
        assert node.values[KEY] == good(2)
        assert await peer.dht.provide(b"\x1e\x20" + bytes(32)) == 2
        assert node.requests.count("ADD_PROVIDER") == 1
        assert node.streams == (len(node.requests) if closes_after_each else 2)


async def test_a_node_that_resets_a_provider_key_still_shows_the_way():
    async with swarm() as net:
        peer, hidden = await net.start(), await net.start()
        other = await net.start(server=False)
        near = wire.Neighbour(hidden.id, (hidden.address,))
        requests = []

        async def serve(stream: Stream) -> None:
            while (frame := await stream.receive()) is not None:
                request = wire.decode(frame)
                requests.append(request.type)
                if request.type is MessageType.GET_PROVIDERS:
                    await stream.reset()
                    return
                await stream.send(wire.encode(Message(request.type, closer_peers=(near,))))

        other.transport.serve(wire.PROTOCOL, serve)
        await hidden.dht.provide(KEY)
        assert await peer.dht.bootstrap([other.address]) == 2
        peer.dht.table.failed(hidden.id)
        peer.dht.table.failed(hidden.id)
        assert [contact.peer for contact in peer.dht.table.contacts()] == [other.id]
        found = await peer.dht.find_providers(KEY)
        assert [neighbour.peer for neighbour in found] == [hidden.id]
        assert requests[-2:] == [MessageType.GET_PROVIDERS, MessageType.FIND_NODE]
        assert peer.dht.table.contacts()[0].failures == 0


async def test_a_generic_client_is_served():
    async with swarm() as net:
        peers = await net.fill(3)
        client = await net.start(server=False)
        await client.transport.connect(peers[0].id, [peers[0].address])
        stream = await client.transport.open_stream(peers[0].id, wire.PROTOCOL)
        record = oracle.Record(key=KEY, value=good(1))
        put = oracle.Message(type=oracle.Message.PUT_VALUE, key=KEY, record=record)
        await stream.send(put.SerializeToString())
        echo = oracle.Message.FromString(await stream.receive() or b"")
        assert echo.record.value == good(1)
        find = oracle.Message(type=oracle.Message.FIND_NODE, key=peer_id_bytes(peers[1].id))
        await stream.send(find.SerializeToString())
        await stream.end()
        answer = oracle.Message.FromString(await stream.receive() or b"")
        assert answer.closerPeers[0].id == peer_id_bytes(peers[1].id)
        assert len(answer.closerPeers) == 2
        assert await stream.receive() is None


@pytest.mark.parametrize("garbage", [b"\xff" * 50, b"\x08\x09", b"\x12\x7fabc"])
async def test_garbage_resets_the_stream_and_nothing_else(garbage):
    async with swarm() as net:
        peers = await net.fill(2)
        for _ in range(3):
            stream = await peers[1].transport.open_stream(peers[0].id, wire.PROTOCOL)
            await stream.send(garbage)
            with pytest.raises(StreamError):
                await stream.receive()
        assert len(await closest(peers[1], KEY)) == 1


async def test_a_peer_that_answers_garbage_is_dropped():
    async with swarm() as net:
        peer = await net.start()
        other = await net.start(server=False)
        node = GenericNode(other, closes_after_each=False)
        await peer.dht.bootstrap([other.address])
        node.values[KEY] = bytes(RECORD_BYTES_MAX + 1)
        for _ in range(CONTACT_FAILURES_MAX):
            assert await peer.dht.get(KEY) is None
        assert other.id not in peer.dht.table


async def test_silent_and_surplus_streams_are_reset(monkeypatch):
    monkeypatch.setattr(dht, "INBOUND_STREAMS_MAX", 2)
    async with swarm() as net:
        server, client = await net.start(), await net.start(server=False)
        await client.transport.connect(server.id, [server.address])

        async def open_one() -> Stream:
            stream = await client.transport.open_stream(server.id, wire.PROTOCOL)
            await stream.send(PING)
            assert wire.decode(await stream.receive() or b"").type is MessageType.PING
            return stream

        first, second = await open_one(), await open_one()
        await first.send(PING)
        await first.receive()
        third = await open_one()
        with pytest.raises(StreamError):  # it was idle for longest
            await second.receive()
        for stream in (first, third):
            await stream.send(PING)
            assert await stream.receive() is not None
        started = trio.current_time()
        with pytest.raises(StreamError):
            await third.receive()
        waited = trio.current_time() - started
        assert waited == pytest.approx(INBOUND_IDLE_SECONDS, abs=1)


async def test_who_asks_without_end_waits_and_others_do_not(monkeypatch):
    """Else one peer's requests are answered as often as its line carries them."""
    seconds = 20.0
    monkeypatch.setattr(dht, "REQUESTS_PER_SECOND", 20.0)
    monkeypatch.setattr(dht, "REQUESTS_BURST", 100.0)
    monkeypatch.setattr(dht, "REQUEST_BYTES", 64)
    async with swarm() as net:
        server, greedy = await net.start(), await net.start(server=False)
        other = await net.start(server=False)
        request = wire.encode(Message(MessageType.GET_VALUE, KEY))
        size = given = 0

        async def open_one(client: Peer) -> Stream:
            await client.transport.connect(server.id, [server.address])
            return await client.transport.open_stream(server.id, wire.PROTOCOL)

        async def ask(stream: Stream) -> None:
            nonlocal size, given
            while True:
                await stream.send(request)
                size = len(await stream.receive() or b"")
                given += 1

        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(ask, await open_one(greedy))
                await trio.sleep(seconds / 2)
                began = trio.current_time()
                stream = await open_one(other)
                for _ in range(10):
                    await stream.send(PING)
                    assert await stream.receive() is not None
                assert trio.current_time() - began < 5, "others do not wait"
        cost = 1 + size / dht.REQUEST_BYTES
        most = dht.REQUESTS_BURST + seconds * dht.REQUESTS_PER_SECOND + 16
        assert given * cost <= most + 8 * cost
