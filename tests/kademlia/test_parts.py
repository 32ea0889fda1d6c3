"""Routing table, record store, provider store and lookup, each alone."""

from __future__ import annotations

import random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import PeerError
from swarm.kademlia.lookup import LOOKUP_QUERIES_MAX, LOOKUP_SECONDS_MAX, Lookup, prefer_diverse
from swarm.kademlia.providers import PROVIDER_SECONDS, ProviderStore, provider_key
from swarm.kademlia.records import RECORD_SECONDS_MAX, InvalidRecord, RecordStore, StoreFull
from swarm.kademlia.routing_table import (
    CONTACT_FRESH_SECONDS,
    RoutingTable,
    bucket_of,
    groups_of,
    key_id,
    node_id,
)
from swarm.kademlia.wire import ADDRESSES_PER_PEER_MAX, KEY_BYTES_MAX, RECORD_BYTES_MAX, Neighbour
from swarm.wire.identity import Identity, PeerId
from tests.kademlia.harness import PlainValidator, good, run
from tests.worlds import WALL

RUNNER = run

IDS = [Identity(number.to_bytes(32, "big")).peer_id for number in range(400)]
OWN, OTHERS = IDS[0], IDS[1:]
FAR = [peer for peer in OTHERS if bucket_of(node_id(OWN), node_id(peer)) == 0]


def address(peer: PeerId, host: str = "127.0.0.1") -> tuple[str, ...]:
    return (f"/ip4/{host}/tcp/1/p2p/{peer}",)


def full_bucket(now: float = 0.0) -> RoutingTable:
    table = RoutingTable(OWN)
    for peer in FAR[:20]:
        assert table.answered(peer, address(peer), now) is None
    return table


def test_an_old_live_contact_stays_and_a_dead_one_is_replaced():
    table = full_bucket()
    fresh = CONTACT_FRESH_SECONDS
    assert table.answered(FAR[20], address(FAR[20]), fresh / 2) is None  # nobody is in doubt
    oldest = table.answered(FAR[21], address(FAR[21]), fresh)
    assert oldest is not None and oldest.peer == FAR[0]
    table.answered(FAR[0], (), fresh)  # it lives
    assert FAR[21] not in table and len(table) == 20
    oldest = table.answered(FAR[22], address(FAR[22]), fresh)
    assert oldest is not None and oldest.peer == FAR[1]
    assert table.failed(FAR[1])
    assert FAR[22] in table and FAR[1] not in table and len(table) == 20
    table.heard_of(FAR[2], fresh)
    table.heard_of(FAR[30], fresh)  # no contact, and none it becomes
    oldest = table.answered(FAR[23], address(FAR[23]), fresh)
    assert oldest is not None and oldest.peer == FAR[3]
    assert FAR[30] not in table


def test_one_failure_without_a_replacement_is_forgiven_but_hides_the_contact():
    table = full_bucket()
    target = node_id(FAR[3])
    assert table.closest(target, 1)[0].peer == FAR[3]
    assert not table.failed(FAR[3])
    assert table.closest(target, 20)[-1].peer == FAR[3]
    table.answered(FAR[3], (), 1.0)
    assert table.closest(target, 1)[0].peer == FAR[3]
    assert not table.failed(FAR[3])
    assert table.failed(FAR[3])
    assert FAR[3] not in table


def test_a_network_gets_two_places_in_a_bucket():
    table = RoutingTable(OWN)
    for number, peer in enumerate(FAR[:6]):
        table.answered(peer, address(peer, f"8.8.8.{number}"), 0.0)
    assert [contact.peer for contact in table.contacts()] == FAR[:2]
    table.answered(FAR[6], address(FAR[6], "8.8.9.1"), 0.0)
    assert FAR[6] in table
    # A replacement of the same network takes the place of one that died.
    assert table.failed(FAR[0])
    assert FAR[5] in table
    # Moving into a network that has its share costs the place.
    table.answered(FAR[6], address(FAR[6], "8.8.8.77"), 1.0)
    assert FAR[6] not in table
    near = next(peer for peer in OTHERS if bucket_of(node_id(OWN), node_id(peer)) == 1)
    table.answered(near, address(near, "8.8.8.9"), 0.0)
    assert near in table


def test_networks():
    assert groups_of(address(OWN)) == ()
    assert groups_of((f"/ip6/::1/tcp/1/p2p/{OWN}",)) == ()
    assert groups_of((f"/ip4/8.8.8.8/tcp/1/p2p/{OWN}",)) == ("8.8.8.0/24",)
    assert groups_of(("/ip6/2001:4860:4860:1::1/tcp/1",)) == ("2001:4860:4860:1::/64",)
    assert groups_of(("/ip4/192.168.1.5/tcp/1",)) == ("192.168.1.0/24",)
    assert groups_of(("/ip4/192.168.1.5/tcp/1", "/ip4/8.8.8.8/tcp/1")) == ("8.8.8.0/24",)
    assert groups_of(("/dns4/a.example/tcp/1",)) == ("dns4/a.example",)
    assert groups_of(("", "/ip4", "/ip4/x/tcp/1", "nonsense")) == ()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["answered", "failed"]), st.sampled_from(OTHERS), st.integers(0, 3)
        ),
        max_size=120,
    )
)
def test_the_table_keeps_its_bounds_whatever_happens(steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarm.kademlia.routing_table.BUCKET_SIZE", 4)
        table = RoutingTable(OWN)
        for now, (what, peer, network) in enumerate(steps):
            if what == "answered":
                table.answered(peer, address(peer, f"8.8.{network}.1"), 100.0 * now)
            else:
                table.failed(peer)
            seen = 0
            for index in range(256):
                bucket = table.bucket(index)
                seen += len(bucket.contacts)
                assert len(bucket.contacts) <= 4 and len(bucket.replacements) <= 4
                assert not bucket.contacts.keys() & bucket.replacements.keys()
                networks = [groups_of(contact.addresses)[0] for contact in bucket.contacts.values()]
                assert all(networks.count(name) <= 2 for name in networks)
                assert all(bucket_of(table.own_id, contact.id) == index
                           for contact in bucket.contacts.values())  # fmt: skip
            assert seen == len(table) == len(table.closest(0, 1000))


# --- records -----------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.wall = WALL

    def __call__(self) -> float:
        return self.wall


def store(clock: Clock | None = None) -> RecordStore:
    return RecordStore({"n": PlainValidator(), "m": PlainValidator()}, 0, clock or Clock())


def test_the_highest_version_stays_and_ties_are_broken_alike():
    records = store()
    assert records.store(b"/n/a", good(2), republish_at=0).value == good(2)
    assert records.store(b"/n/a", good(1), republish_at=0).value == good(2)
    assert records.store(b"/n/a", good(3, text="a"), republish_at=0).value == good(3, text="a")
    assert records.store(b"/n/a", good(3, text="b"), republish_at=0).value == good(3, text="b")
    assert records.store(b"/n/a", good(3, text="a"), republish_at=0).value == good(3, text="b")
    assert len(records) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"/n/a", b"bad"),
        (b"/n/a", b""),
        (b"/n/a", good(1, lifetime_seconds=0)),
        (b"/n/a", good(1, text="x" * RECORD_BYTES_MAX)),
        (b"/n/" + bytes(KEY_BYTES_MAX), good(1)),
        (b"/other/a", good(1)),
        (b"n/a", good(1)),
        (b"/n", good(1)),
        (b"/n/", good(1)),
        (b"", good(1)),
        (b"/\xff/a", good(1)),
    ],
)
def test_records_that_may_not_be_stored(key, value):
    records = store()
    with pytest.raises(InvalidRecord):
        records.store(key, value, republish_at=0)
    assert len(records) == 0 and records.get(key) is None


def test_records_expire_by_their_own_word_and_at_the_latest_after_a_day():
    clock = Clock()
    records = store(clock)
    records.store(b"/n/a", good(1, lifetime_seconds=10), republish_at=0)
    records.store(b"/n/b", good(1, lifetime_seconds=1e9), republish_at=0)
    clock.wall += 10
    assert records.get(b"/n/a") is None and len(records) == 1
    clock.wall += RECORD_SECONDS_MAX
    assert len(records) == 1
    records.expire()
    assert len(records) == 0


def test_a_full_namespace_keeps_the_nearest_and_leaves_the_other_alone(monkeypatch):
    monkeypatch.setattr("swarm.kademlia.records.RECORDS_MAX", 5)
    records = store()
    records.store(b"/m/x", good(1), republish_at=0)
    keys = sorted((b"/n/%d" % number for number in range(30)), key=key_id)
    for key in reversed(keys[:10]):
        records.store(key, good(1), republish_at=0)
    for key in keys[10:]:
        with pytest.raises(StoreFull):
            records.store(key, good(1), republish_at=0)
    assert [key for key in keys if records.get(key)] == keys[:5]
    assert records.get(b"/m/x") is not None


def test_bytes_are_bounded_too(monkeypatch):
    size = len(good(1, text="x" * 100))
    monkeypatch.setattr("swarm.kademlia.records.RECORD_STORE_BYTES_MAX", 3 * size)
    records = store()
    keys = sorted((b"/n/%d" % number for number in range(10)), key=key_id)
    for key in reversed(keys):
        records.store(key, good(1, text="x" * 100), republish_at=0)
    assert [key for key in keys if records.get(key)] == keys[:3]


# --- providers ---------------------------------------------------------------------------------


def test_providers_are_kept_once_bounded_and_expire(monkeypatch):
    monkeypatch.setattr("swarm.kademlia.providers.PROVIDER_KEYS_MAX", 2)
    monkeypatch.setattr("swarm.kademlia.providers.PROVIDERS_PER_KEY_MAX", 3)
    monkeypatch.setattr("swarm.kademlia.providers.PROVIDER_KEYS_PER_PEER_MAX", 2)
    providers = ProviderStore(0)
    key = provider_key(bytes(32))
    for peer in (*IDS[:4], IDS[3]):
        assert providers.add(key, Neighbour(peer, address(peer)), 0.0)
    assert [n.peer for n in providers.get(key, 1.0)] == IDS[1:4]
    assert len(providers.sample(key, 2, 1.0, random.Random(1))) == 2
    keys = sorted((b"%d" % number for number in range(50)), key=key_id)
    nearest = [name for name in keys if key_id(name) < key_id(key)][:2]
    far = max(keys, key=key_id)
    assert providers.add(nearest[1], Neighbour(IDS[1]), 0.0)
    assert not providers.add(far, Neighbour(IDS[5]), 0.0)  # full of nearer keys
    assert providers.add(nearest[0], Neighbour(IDS[5]), 0.0)
    assert providers.get(key, 1.0) == []  # the farthest made room
    assert providers.add(nearest[1], Neighbour(IDS[1]), 0.0)
    assert not providers.add(b"", Neighbour(IDS[6]), 0.0)
    assert not providers.add(bytes(81), Neighbour(IDS[6]), 0.0)
    assert len(providers) == 2
    providers.expire(PROVIDER_SECONDS)
    assert len(providers) == 0


def test_one_peer_cannot_be_provider_of_everything(monkeypatch):
    monkeypatch.setattr("swarm.kademlia.providers.PROVIDER_KEYS_PER_PEER_MAX", 2)
    providers = ProviderStore(0)
    added = [providers.add(b"%d" % number, Neighbour(IDS[1]), 0.0) for number in range(4)]
    assert added == [True, True, False, False]
    assert providers.add(b"3", Neighbour(IDS[2]), 0.0)


# --- lookups -----------------------------------------------------------------------------------


def test_peers_of_a_crowded_network_come_last():
    crowd = [Neighbour(peer, address(peer, f"8.8.8.{n}")) for n, peer in enumerate(IDS[:5])]
    others = [Neighbour(peer, address(peer, f"9.9.{n}.1")) for n, peer in enumerate(IDS[5:8])]
    assert prefer_diverse(crowd + others, 5) == crowd[:2] + others
    assert prefer_diverse(crowd + others, 7) == crowd[:2] + others + crowd[2:4]
    assert prefer_diverse(crowd, 20) == crowd


async def test_a_lookup_asks_nobody_twice_and_not_more_than_it_may():
    asked: list[PeerId] = []

    async def ask(neighbour: Neighbour) -> list[Neighbour]:
        asked.append(neighbour.peer)
        await trio.sleep(0.1)
        return [Neighbour(peer, address(peer)) for peer in [*truth[:19], OWN, *OTHERS]]

    truth = sorted(OTHERS, key=node_id)[:20]
    seeds = [Neighbour(peer, address(peer)) for peer in [*OTHERS[:5], truth[19]]]
    result = await Lookup(0, seeds, ask, own=OWN).run()
    assert len(asked) == len(set(asked)) == result.asked and OWN not in asked
    assert [neighbour.peer for neighbour in result.closest] == truth
    assert (result.hops, result.failed, result.timed_out) == (2, 0, False)


async def test_invented_peers_cost_a_bounded_number_of_requests():
    source = random.Random(3)

    async def ask(neighbour: Neighbour) -> list[Neighbour]:
        invented = [Identity(source.randbytes(32)).peer_id for _ in range(20)]
        return [Neighbour(peer, address(peer)) for peer in invented]

    result = await Lookup(0, [Neighbour(IDS[1])], ask, own=OWN).run()
    assert result.asked <= LOOKUP_QUERIES_MAX


@pytest.mark.parametrize("wrong", [1, ADDRESSES_PER_PEER_MAX])
@pytest.mark.parametrize("liar_is_first", [True, False])
async def test_wrong_addresses_are_made_good_by_another_word(wrong, liar_is_first):
    right = address(IDS[2], "9.9.9.9")
    false = tuple(each for n in range(wrong) for each in address(IDS[2], f"6.6.6.{n}"))

    async def ask(neighbour: Neighbour) -> list[Neighbour]:
        if neighbour.peer == IDS[2]:
            await trio.sleep(0.5)
            if right[0] not in neighbour.addresses:
                raise PeerError("nobody there")
            return []
        liar = neighbour.peer == IDS[1]
        await trio.sleep(0 if liar == liar_is_first else 1)
        return [Neighbour(IDS[2], false if liar else right)]

    seeds = [Neighbour(IDS[1]), Neighbour(IDS[3])]
    result = await Lookup(node_id(IDS[2]), seeds, ask, own=OWN).run()
    assert result.closest[0].peer == IDS[2]


@pytest.mark.parametrize("silent, seconds", [(1, 2.0), (2, 2.0), (3, 8.0)])
async def test_a_lookup_waits_for_the_late_only_where_most_are(silent, seconds):
    """Of four that are asked, some answer after 8 s only."""

    async def ask(neighbour):
        if neighbour.peer in IDS[1 : 1 + silent]:
            await trio.sleep(8)
        return []

    seeds = [Neighbour(peer) for peer in IDS[1:5]]
    started = trio.current_time()
    result = await Lookup(0, seeds, ask, own=OWN).run()
    assert trio.current_time() - started == pytest.approx(seconds)
    assert not result.timed_out
    assert len(result.late) + len(result.closest) == 4
    assert len(result.closest) >= 2


async def test_a_lookup_ends_at_its_deadline_with_what_it_has():
    async def ask(neighbour: Neighbour) -> list[Neighbour]:
        if neighbour.peer != IDS[1]:  # most are silent
            await trio.sleep_forever()
        return []

    seeds = [Neighbour(peer) for peer in IDS[1:4]]
    started = trio.current_time()
    result = await Lookup(0, seeds, ask, own=OWN).run()
    assert result.timed_out and [n.peer for n in result.closest] == [IDS[1]]
    assert trio.current_time() - started == pytest.approx(LOOKUP_SECONDS_MAX)
