"""Whole DHTs in virtual time: what users of the room rely on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from swarm.kademlia import wire
from swarm.kademlia.contacts import REQUEST_SECONDS_MAX
from swarm.kademlia.dht import MAINTENANCE_SECONDS, QUORUM, Kademlia
from swarm.kademlia.providers import PROVIDER_SECONDS, provider_key
from swarm.kademlia.publishing import REPUBLISH_SECONDS
from swarm.kademlia.records import InvalidRecord
from swarm.kademlia.routing_table import CONTACT_FRESH_SECONDS, key_id, node_id
from swarm.kademlia.wire import Message, MessageType, Neighbour, Record
from swarm.transport import ConnectError
from swarm.wire.identity import Identity, peer_id_bytes
from tests.kademlia.harness import Peer, closest, good, run, swarm

RUNNER = run

KEY = b"/swarm-run/alice/first"


def nearest(peers: Sequence[Peer], key: bytes, count: int) -> list[Peer]:
    """The truth about who is nearest."""
    return sorted(peers, key=lambda peer: node_id(peer.id) ^ key_id(key))[:count]


def held(peer: Peer, key: bytes = KEY) -> bytes | None:
    record = peer.dht.records.get(key)
    return record.value if record is not None else None


@pytest.mark.slow
async def test_lookups_find_the_nearest_peers_and_everybody():
    async with swarm() as net:
        await net.fill(80)
        await trio.sleep(5)
        for number in range(10):
            asker = net.peers[number * 7]
            key = b"/swarm-run/bob/%d" % number
            others = [peer for peer in net.peers if peer is not asker]
            found = await closest(asker, key)
            assert [n.peer for n in found] == [p.id for p in nearest(others, key, 20)]
            target = net.peers[number * 5 + 1]
            assert await asker.dht.find_peer(target.id) == tuple(target.transport.addresses())
        lookups = net.peers[0].named("dht.lookup_finished")
        assert all(1 <= fields["hops"] <= 4 and not fields["timed_out"] for fields in lookups)


async def test_a_record_is_stored_at_the_nearest_and_read_from_anywhere():
    async with swarm() as net:
        await net.fill(36)
        await trio.sleep(5)
        stored = await net.peers[3].dht.put(KEY, good(1))
        assert stored >= 20
        assert net.peers[3].named("dht.published")[-1]["asked"] == stored
        assert all(held(peer) == good(1) for peer in nearest(net.peers, KEY, 20))
        for peer in net.peers[::9]:
            assert await peer.dht.get(KEY) == good(1)
        assert await net.peers[5].dht.get(b"/swarm-run/nobody/nothing") is None


async def test_a_read_finds_the_newest_version_and_repairs_stale_holders(monkeypatch):
    async with swarm() as net:
        await net.fill(48)
        await trio.sleep(5)
        await net.peers[3].dht.put(KEY, good(1))
        holders = nearest(net.peers, KEY, 20)
        # A write that reached the barest majority: every quorum read meets one of them.
        for peer in holders[9:]:
            peer.dht.records.store(KEY, good(2), republish_at=1e9)
        stale = holders[0]
        assert held(stale) == good(1)
        # Its own stale copy does not answer for it, though it is the nearest of all.
        assert await stale.dht.get(KEY) == good(2)
        assert held(stale) == good(2)
        reader = next(peer for peer in net.peers if peer not in holders)
        monkeypatch.setattr("swarm.kademlia.dht.QUORUM", 20)
        assert await reader.dht.get(KEY) == good(2)
        assert [held(peer) for peer in holders] == [good(2)] * 20
        # Putting the old one again changes nothing.
        assert await net.peers[3].dht.put(KEY, good(1)) == 0


async def test_alone_a_peer_answers_from_its_own_copy():
    async with swarm() as net:
        alone = await net.start()
        assert await alone.dht.put(KEY, good(1)) == 1
        assert await alone.dht.get(KEY) == good(1)


@pytest.mark.slow
async def test_expired_records_vanish_everywhere():
    async with swarm() as net:
        await net.fill(30)
        await net.peers[2].dht.put(KEY, good(1, lifetime_seconds=900))
        await trio.sleep(700)
        assert await net.peers[9].dht.get(KEY) == good(1, lifetime_seconds=900)
        await trio.sleep(300)
        assert await net.peers[9].dht.get(KEY) is None
        assert [len(peer.dht.records) for peer in net.peers] == [0] * 30
        await trio.sleep(2 * REPUBLISH_SECONDS)
        assert net.peers[2].named("dht.own_record_ended")
        with pytest.raises(InvalidRecord):
            await net.peers[2].dht.put(KEY, good(2, lifetime_seconds=900))


async def test_invalid_records_are_refused_and_disbelieved():
    async with swarm() as net:
        peers = await net.fill(30)
        with pytest.raises(InvalidRecord):
            await peers[0].dht.put(KEY, b"forged")
        with pytest.raises(InvalidRecord):
            await peers[0].dht.put(b"/unknown/x", good(1))
        victim = peers[4]
        stream = await peers[0].transport.open_stream(victim.id, wire.PROTOCOL)
        for key, value in ((KEY, b"forged"), (b"/other/x", good(1)), (KEY, good(1, -1))):
            message = Message(MessageType.PUT_VALUE, key, Record(key, value))
            await stream.send(wire.encode(message))
            answer = wire.decode(await stream.receive() or b"")
            assert answer.record is None
        await stream.send(
            wire.encode(Message(MessageType.PUT_VALUE, KEY, Record(KEY + b"2", good(1))))
        )
        assert wire.decode(await stream.receive() or b"").record is None
        await stream.reset()
        assert len(victim.dht.records) == 0
        assert len(victim.named("dht.record_refused")) == 4


def forge(dht: Kademlia, message: Message, truth: Message) -> Message:
    """Answer every read with a forged record."""
    if message.type is MessageType.GET_VALUE:
        return Message(truth.type, truth.key, Record(message.key, b"forged"), truth.closer_peers)
    return truth


async def test_forged_answers_neither_win_nor_count_as_quorum():
    async with swarm() as net:
        await net.fill(20)
        for _ in range(20):
            liar = await net.start(lie=forge)
            await liar.dht.bootstrap([net.peers[0].address])
        await trio.sleep(5)
        await net.peers[1].dht.put(KEY, good(1))
        reader = net.peers[7]
        assert await reader.dht.get(KEY) == good(1)
        assert reader.named("dht.record_disbelieved")


@pytest.mark.slow
async def test_providers_are_found_once_each_and_expire():
    key = provider_key(bytes(32))
    async with swarm() as net:
        peers = await net.fill(40)
        await trio.sleep(5)
        for peer in peers[:5]:
            assert await peer.dht.provide(key) >= 20
            assert await peer.dht.provide(key) >= 20
        found = await peers[33].dht.find_providers(key)
        assert sorted(n.peer for n in found) == sorted(peer.id for peer in peers[:5])
        assert {n.peer: n.addresses for n in found} == {
            peer.id: (peer.address,) for peer in peers[:5]
        }
        assert len(await peers[33].dht.find_providers(key, limit=3)) == 3
        peers[0].stop()
        peers[1].dht.stop_providing(key)
        await trio.sleep(PROVIDER_SECONDS + 60)
        found = await peers[33].dht.find_providers(key)
        assert sorted(n.peer for n in found) == sorted(peer.id for peer in peers[2:5])


async def test_nobody_can_announce_another_as_provider():
    key = provider_key(bytes(32))
    async with swarm() as net:
        peers = await net.fill(3)
        message = Message(
            MessageType.ADD_PROVIDER,
            key,
            provider_peers=tuple(Neighbour(peer.id, (peer.address,)) for peer in peers),
        )
        stream = await peers[1].transport.open_stream(peers[0].id, wire.PROTOCOL)
        await stream.send(wire.encode(message))
        await stream.end()
        assert await stream.receive() is None
        found = peers[0].dht.providers.get(key, trio.current_time())
        assert [n.peer for n in found] == [peers[1].id]


@pytest.mark.slow
async def test_a_record_outlives_half_of_the_peers_and_then_all_its_first_holders():
    async with swarm() as net:
        await net.fill(60)
        await trio.sleep(5)
        publisher = net.peers[3]
        await publisher.dht.put(KEY, good(1))
        first = [peer for peer in net.peers if held(peer) is not None]
        publisher.stop()
        for peer in net.peers[4::2]:
            peer.stop()
        alive = net.peers[:3] + net.peers[5::2]
        await trio.sleep(3 * REPUBLISH_SECONDS)
        holders = nearest(alive, KEY, 20)
        assert sum(held(peer) == good(1) for peer in holders) >= 18
        for peer in first:
            peer.stop()
        await trio.sleep(1)
        survivors = [peer for peer in alive if peer not in first]
        assert len(survivors) >= 10
        assert await survivors[0].dht.get(KEY) == good(1)


async def test_whoever_asks_nothing_notices_that_a_contact_is_gone():
    """As a bootstrap peer does: it would name the contact to every newcomer."""
    async with swarm() as net:
        peers = await net.fill(3)
        await trio.sleep(5)
        assert peers[2].id in peers[0].dht.table
        peers[2].stop()
        await trio.sleep(CONTACT_FRESH_SECONDS + 120)
        assert peers[2].id not in peers[0].dht.table
        assert peers[1].id in peers[0].dht.table


async def test_nobody_is_sent_to_peers_that_are_long_dead():
    """However many died at once, and though nobody looks anything up."""
    async with swarm() as net:
        peers = await net.fill(12)
        await trio.sleep(60)
        alive, dead = peers[:4], {peer.id for peer in peers[4:]}
        for peer in peers[4:]:
            peer.stop()
        await trio.sleep(240)
        key = peer_id_bytes(alive[3].id)
        for peer in alive[:3]:
            answer = peer.dht._server.answer(alive[3].id, Message(MessageType.FIND_NODE, key))
            named = {each.peer for each in answer.closer_peers}  # type: ignore[union-attr]
            assert not named & dead
            assert named == {other.id for other in alive} - {peer.id, alive[3].id}


async def test_contacts_that_stay_connected_are_known_to_be_there():
    async with swarm() as net:
        peers = await net.fill(3)
        await trio.sleep(3 * CONTACT_FRESH_SECONDS)
        contacts = peers[0].dht.table.contacts()
        assert {contact.peer for contact in contacts} == {peers[1].id, peers[2].id}
        soon = 2 * MAINTENANCE_SECONDS
        assert all(contact.seen > trio.current_time() - soon for contact in contacts)


@pytest.mark.slow
async def test_a_crowd_from_one_network_neither_fills_tables_nor_hides_a_record():
    async with swarm() as net:
        hosts = [f"9.{number}.0.1" for number in range(50)]
        honest = await net.fill(50, hosts=hosts)
        await trio.sleep(5)
        # Ids ground until they are nearer to the key than honest ones, all in one /24.
        ground = sorted(
            (Identity(number.to_bytes(32, "little")) for number in range(3000)),
            key=lambda identity: node_id(identity.peer_id) ^ key_id(KEY),
        )[:30]
        crowd = []
        for number, identity in enumerate(ground):
            liar = await net.start(identity=identity, host=f"8.8.8.{number + 1}", lie=hide)
            await liar.dht.bootstrap([honest[number].address])
            crowd.append(liar.id)
        assert len(set(crowd) & {p.id for p in nearest(net.peers, KEY, 20)}) == 20
        await trio.sleep(10)
        for peer in honest:
            for index in range(256):
                inside = peer.dht.table.bucket(index).contacts
                assert sum(contact in crowd for contact in inside) <= 2
        assert await honest[5].dht.put(KEY, good(1)) >= QUORUM
        for reader in honest[::7]:
            assert await reader.dht.get(KEY) == good(1)


def hide(dht: Kademlia, message: Message, truth: Message) -> Message:
    """Claim to store, deny to have, and name only its like."""
    if message.key == peer_id_bytes(dht.peer_id):
        return truth
    if message.type is MessageType.PUT_VALUE:
        return Message(message.type, message.key, message.record)
    like = [
        contact
        for contact in dht.table.closest(key_id(message.key), 1000)
        if any("/8.8.8." in address for address in contact.addresses)
    ]
    return Message(truth.type, truth.key, closer_peers=tuple(like[:20]))


def invent(dht: Kademlia, message: Message, truth: Message) -> Message:
    """Name peers that do not exist, just beside the target, at other peers' addresses."""
    if message.key == peer_id_bytes(dht.peer_id):
        return truth
    address = dht._transport.addresses()[0].rpartition("/p2p/")[0]
    invented = sorted(
        (Identity(dht._world.random.randbytes(32)).peer_id for _ in range(60)),
        key=lambda peer: node_id(peer) ^ key_id(message.key),
    )[:20]
    return Message(
        truth.type,
        truth.key,
        closer_peers=tuple(Neighbour(peer, (f"{address}/p2p/{peer}",)) for peer in invented),
    )


@pytest.mark.slow
async def test_disjoint_paths_survive_liars():
    async with swarm() as net:
        honest = await net.fill(40)
        for _ in range(10):
            liar = await net.start(lie=invent)
            await liar.dht.bootstrap([honest[0].address])
        await trio.sleep(5)
        await honest[2].dht.put(KEY, good(1))
        for reader in honest[::8]:
            assert await reader.dht.get(KEY) == good(1)
            others = [peer for peer in net.peers if peer is not reader]
            found = [n.peer for n in await closest(reader, KEY)]
            assert found == [peer.id for peer in nearest(others, KEY, 20)]


@pytest.mark.slow
async def test_clients_use_the_dht_and_enter_no_table():
    async with swarm() as net:
        await net.fill(25)
        client = await net.start(server=False)
        await client.dht.bootstrap([net.peers[0].address])
        assert await client.dht.put(KEY, good(1)) >= QUORUM
        assert await client.dht.get(KEY) == good(1)
        assert await net.peers[4].dht.get(KEY) == good(1)
        await trio.sleep(2 * REPUBLISH_SECONDS)
        assert not [peer for peer in net.peers if client.id in peer.dht.table]
        assert len(client.dht.records) == 0


async def test_dead_contacts_leave_the_table_and_a_stalled_one_costs_a_deadline():
    async with swarm() as net:
        peers = await net.fill(10)
        await trio.sleep(1)
        peers[3].stop()
        net.network.cut(peers[1].id, peers[4].id)
        started = trio.current_time()
        found = await closest(peers[1], KEY)
        assert len(found) == 7
        assert trio.current_time() - started < REQUEST_SECONDS_MAX + 1
        await closest(peers[1], KEY)
        assert peers[3].id not in peers[1].dht.table
        assert peers[4].id not in peers[1].dht.table
        net.network.heal(peers[1].id, peers[4].id)


async def test_bootstrap_says_who_does_not_answer_and_returns_when_they_do():
    async with swarm() as net:
        first = await net.start()
        second = await net.start()
        net.network.sever(first.id, second.id)
        with pytest.raises(ConnectError, match="no answer within"):
            await second.dht.bootstrap([first.address])
        with pytest.raises(ValueError, match="/p2p/"):
            await second.dht.bootstrap(["/ip4/127.0.0.1/tcp/1"])
        net.network.heal(first.id, second.id)
        await trio.sleep(60)
        assert first.id in second.dht.table


async def test_idle_peers_are_nearly_silent():
    async with swarm() as net:
        peers = await net.fill(20)
        await trio.sleep(60)
        before = sum(len(peer.named("dht.lookup_finished")) for peer in peers)
        await trio.sleep(3600)
        lookups = sum(len(peer.named("dht.lookup_finished")) for peer in peers) - before
        assert lookups <= 20 * 2 * 6  # two refreshes an hour of each of a few buckets


def test_the_same_seed_gives_the_same_trace():
    async def main():
        trace = []
        async with swarm(seed=5) as net:
            await net.fill(25)
            await net.peers[2].dht.put(KEY, good(1))
            net.peers[4].stop()
            await trio.sleep(1000)
            await net.peers[6].dht.get(KEY)
            for peer in net.peers:
                trace.append([(name, str(fields)) for name, fields in peer.events])
        return trace

    assert run(main) == run(main)


async def test_records_may_be_withdrawn_while_others_are_published_again() -> None:
    """Those withdrawn have expired: their publisher drops such a record in the same round."""
    async with swarm() as net:
        pairs = {b"/swarm-run/a/%d" % n: b"/swarm-run/b/%d" % n for n in range(40)}
        publisher = (await net.fill(4))[0]
        began = trio.current_time()
        withdrawn: list[bytes] = []

        def withdraw(_: Kademlia, message: Message, truth: Message) -> Message:
            again = trio.current_time() - began > REPUBLISH_SECONDS
            if again and message.type is MessageType.PUT_VALUE and message.key in pairs:
                withdrawn.append(pairs[message.key])
                publisher.dht.withdraw(pairs[message.key])
            return truth

        await (await net.start(lie=withdraw)).dht.bootstrap([publisher.address])
        for lasting, short in pairs.items():
            await publisher.dht.put(lasting, good(1))
            await publisher.dht.put(short, good(1, lifetime_seconds=REPUBLISH_SECONDS / 2))
        await trio.sleep(2 * REPUBLISH_SECONDS)
        assert set(withdrawn) == set(pairs.values())
        ended = {each["key"] for each in publisher.named("dht.own_record_ended")}
        assert 0 < len(ended) < len(pairs), "some were withdrawn first, and some were not"


@pytest.mark.slow
async def test_a_record_from_when_the_network_was_small_is_given_to_those_who_come() -> None:
    async with swarm() as net:
        early = await net.fill(4)
        await early[1].dht.put(KEY, good(1))
        await net.fill(60)
        await trio.sleep(60)  # far less than a republish interval
        holders = [peer for peer in nearest(net.peers, KEY, 20) if held(peer) == good(1)]
        assert len(holders) > 20 // 2
        for peer in net.peers[::7]:
            assert await peer.dht.get(KEY) == good(1)
