"""A peer of a run as `swarm.node` puts it together, over the memory network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
import pytest
import trio

from swarm.errors import PeerError
from swarm.kademlia.lookup import LOOKUP_SECONDS_MAX
from swarm.node.node import RECORDS_BYTES_MAX, RECORDS_MAX
from swarm.node.policies import SOURCES_MAX
from swarm.node.run_node import RunNode
from swarm.node.searches import PAUSE_SECONDS_MAX, SEARCH_SECONDS_MAX
from swarm.run.admission import admits
from swarm.run.records import peer_key
from swarm.shardcast import limits
from swarm.transport import Source
from swarm.wire.identity import PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import PeerRecord
from tests.ledger.harness import OWNER, TRAINER, WORKER, Peer, Swarm, identity, sealed

RECORD = PeerRecord(roles=["worker"], addresses=[], bulk_addresses=[], agent="")


async def publish(peer: Peer, step: int) -> bytes:
    """A small checkpoint of this peer; its manifest's digest."""
    disk = peer.node.disk
    await disk.write("made/model.safetensors", bytes([step]) * limits.PIECE_BYTES_MIN)
    held = await peer.run_node.store.publish("made", 0, step)
    return held.digest


async def test_a_peer_whose_run_changes_its_mode_says_what_it_passes_on(tmp_path: Path) -> None:
    run = Swarm(tmp_path)
    async with run.peer(TRAINER) as trainer, run.peer(WORKER) as worker:
        have = trainer.run_node.policies.have
        digest = await publish(worker, 0)

        def is_claimed() -> bool:
            return have.claims.of(WORKER.peer_id, digest) is not None

        await trainer.until(is_claimed, "an open run's peer says what it has")
        message = run.manifest.message
        assert isinstance(message, RunManifest)
        for version, mode in ((2, "relay-only"), (3, "open"), (4, "open"), (5, "relay-only")):
            changed = msgspec.structs.replace(message, version=version, broadcast_mode=mode)
            envelope = sealed(OWNER, changed, worker.run_node.run.id, sequence=version)
            trainer.run_node.gossip.publish(envelope)
            await trio.sleep(5)
            assert worker.run_node.run.manifest.version == version
            assert is_claimed() == (mode == "open"), mode


def learn(peer: Peer, numbers: Iterable[int]) -> None:
    """Let a peer hear of others with these numbers, that are not there."""
    for number in numbers:
        peer.node.learn_record(sealed(identity(number), RECORD, ""))


async def test_in_a_large_run_neighbours_and_some_of_the_others_are_sources(tmp_path: Path) -> None:
    run = Swarm(tmp_path)
    async with AsyncExitStack() as stack:
        strangers = range(1000, 1400)
        # Last of all in the order of their ids.
        keys = sorted(map(identity, range(100, 200)), key=lambda key: key.peer_id)[-4:]
        await stack.enter_async_context(run.peer(TRAINER))
        connected = await stack.enter_async_context(run.apart(keys[0]))
        speaker, *viewers = [await stack.enter_async_context(run.peer(key)) for key in keys[1:]]
        await trio.sleep(5)
        for peer in viewers:
            learn(peer, strangers)
            peer.node.learn_record(sealed(keys[0], RECORD, ""))
            peer.node.learn_record(sealed(keys[1], RECORD, ""))
        first, second = [peer.run_node for peer in viewers]
        assert first.policies.have.claims.announces(speaker.node.peer_id)
        assert not first.policies.have.claims.announces(connected.node.peer_id)
        provider = Source(max(identity(number).peer_id for number in strangers))
        first.policies._providers = {b"digest": [provider]}

        def found(part: RunNode, digest: bytes = b"digest") -> set[PeerId]:
            sources = [PeerId(str(source.peer)) for source in part.policies.sources(digest)]
            assert sources == sorted(set(sources))
            assert len(sources) == SOURCES_MAX
            return set(sources)

        wanted = {speaker.node.peer_id, connected.node.peer_id, provider.peer}
        assert wanted < found(first)
        assert found(first) == found(first), "they do not change from look to look"
        assert len(found(first) & found(second)) < SOURCES_MAX / 2, "nor are they everybody's"
        assert len(found(first) & found(first, b"other")) < SOURCES_MAX / 2
        before = found(first)
        learn(viewers[0], range(1400, 1401))
        assert len(before - found(first)) <= 1


async def test_peers_that_were_met_are_remembered_however_many_one_is_told_of(
    tmp_path: Path,
) -> None:
    """Records of invented peers are as good as any: who hands them on makes them by thousands."""
    run = Swarm(tmp_path)
    async with run.peer(TRAINER) as trainer, run.peer(WORKER) as worker:
        for key in (WORKER, TRAINER):
            trainer.node.learn_record(sealed(key, RECORD, ""))
        learn(trainer, range(1000, 1000 + RECORDS_MAX))
        assert len(trainer.node.records()) == RECORDS_MAX
        assert trainer.node.record(identity(1000).peer_id) is None
        assert {TRAINER.peer_id, worker.node.peer_id} <= set(trainer.node._records)
        long = ["/dns4/" + "x" * 280] * 16
        record = PeerRecord(roles=["relay"], addresses=long, bulk_addresses=long)
        for number in range(3000, 3300):
            trainer.node.learn_record(sealed(identity(number), record, ""))
        held = trainer.node.records()
        assert sum(len(envelope.raw) for envelope in held) <= RECORDS_BYTES_MAX
        assert {TRAINER.peer_id, worker.node.peer_id} <= {one.sender for one in held}


async def test_a_flood_of_long_records_displaces_only_long_ones(tmp_path: Path) -> None:
    async with Swarm(tmp_path).peer(TRAINER) as trainer:
        learn(trainer, range(1000, 1100))
        long = ["/dns4/" + "x" * 280] * 16
        for number in range(3000, 3400):
            record = PeerRecord(roles=["relay"], addresses=long, bulk_addresses=long)
            trainer.node.learn_record(sealed(identity(number), record, ""))
        held = [envelope.sender for envelope in trainer.node.records()]
        assert {identity(number).peer_id for number in range(1000, 1100)} < set(held)
        assert held[-1] == identity(3399).peer_id, "the newest of the long ones is kept"


async def test_the_bytes_of_an_unreachable_peers_record_are_free_again(tmp_path: Path) -> None:
    async with Swarm(tmp_path).peer(TRAINER) as trainer:
        before = trainer.node._records_bytes
        learn(trainer, [1000])
        with pytest.raises(PeerError):
            await trainer.node.reach(identity(1000).peer_id)
        assert trainer.node._records_bytes == before


async def test_a_peer_that_is_down_is_searched_for_once_and_then_ever_less_often(
    tmp_path: Path,
) -> None:
    run = Swarm(tmp_path)
    async with run.peer(TRAINER) as trainer, run.peer(WORKER):
        gone, searches = identity(1000).peer_id, 0
        get = trainer.node.dht.get

        async def counted(key: bytes) -> bytes | None:
            nonlocal searches
            searches += key == peer_key(gone)  # it looks for trusted peers, too
            return await get(key)

        trainer.node.dht.get = counted  # type: ignore[method-assign]

        async def miss() -> None:
            with pytest.raises(PeerError, match=gone):
                await trainer.node.reach(gone)

        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(miss)
        assert searches == 1, "they share one search"
        for _ in range(150):
            await miss()
            await trio.sleep(6)
        assert 900 / PAUSE_SECONDS_MAX <= searches < 900 / PAUSE_SECONDS_MAX + 5


async def test_a_peer_that_returns_to_its_address_is_reached_at_once(tmp_path: Path) -> None:
    """Although the DHT is not searched again for a while."""
    run = Swarm(tmp_path)
    async with run.peer(TRAINER) as trainer, run.apart(WORKER) as worker:
        at = list(worker.node.transport.addresses())
        record = msgspec.structs.replace(RECORD, addresses=at)
        trainer.node.learn_record(sealed(WORKER, record, ""))
        run.network.sever(TRAINER.peer_id, WORKER.peer_id)
        connect, dials = trainer.node.transport.connect, 0

        async def counted(peer: PeerId, addresses: Sequence[str]) -> None:
            nonlocal dials
            dials += peer == WORKER.peer_id
            await connect(peer, addresses)

        trainer.node.transport.connect = counted  # type: ignore[method-assign]

        async def miss() -> None:
            with pytest.raises(PeerError, match=WORKER.peer_id):
                await trainer.node.reach(WORKER.peer_id)

        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(miss)
        assert dials <= 2, "those that wait share the failure"
        await miss()
        run.network.heal(TRAINER.peer_id, WORKER.peer_id)
        await trainer.node.reach(WORKER.peer_id)
        assert WORKER.peer_id in trainer.node.transport.connected()
        assert trainer.node.record(WORKER.peer_id) == record, "its pieces are found there"


async def test_who_says_where_it_is_is_reached_though_strangers_hold_up_the_search(
    tmp_path: Path,
) -> None:
    run = Swarm(tmp_path)
    async with run.peer(TRAINER) as trainer, run.apart(WORKER) as worker:
        await trainer.node.transport.disconnect(WORKER.peer_id)

        async def silent(key: bytes) -> None:
            await trio.sleep(LOOKUP_SECONDS_MAX)

        trainer.node.dht.get = silent  # type: ignore[assignment]
        reached: list[float] = []

        async def reach() -> None:
            with suppress(PeerError):
                await trainer.node.reach(WORKER.peer_id)
                reached.append(trio.current_time() - began)

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(reach)
            await trio.sleep(1)
            at = list(worker.node.transport.addresses())
            record = msgspec.structs.replace(RECORD, addresses=at)
            trainer.node.learn_record(sealed(WORKER, record, ""))
        assert len(reached) == 2 and max(reached) < SEARCH_SECONDS_MAX + 1


async def test_bulk_servers_are_shown_a_renewed_admission_before_the_last_one_is_old(
    tmp_path: Path,
) -> None:
    """Every new credential costs new connections; each is valid while it is shown."""
    run = Swarm(tmp_path)
    async with run.peer(TRAINER), run.peer(WORKER) as worker:
        transport, lease = worker.node.transport, worker.run_node.lease
        assert lease is not None
        shown: list[bytes] = []
        for _ in range(100):
            await trio.sleep(1)
            credential = transport._credential  # type: ignore[attr-defined]
            now = worker.node.world.wall_time()
            assert admits(worker.run_node.run, WORKER.peer_id, credential, now + 25)
            if credential not in shown:
                shown.append(credential)
        assert 3 <= len(shown) <= 5
