"""Bootstrap peers without room, and those long gone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from swarm.errors import PeerError
from swarm.node import joining
from swarm.node.joining import join_network
from swarm.run.manifest_exchange import BOOTSTRAP_SECONDS
from swarm.run.run import Run
from swarm.settings import PeerSettings
from swarm.wire.identity import Identity
from tests.ledger.harness import ALICE, OWNER, TRAINER, Swarm
from tests.network.harness import identity, sealed


@pytest.mark.parametrize("has_room_after", [joining.ROOM_DEADLINE_SECONDS - 10, None])
async def test_a_newcomer_without_room_waits_for_its_turn(
    has_room_after: float | None, tmp_path: Path
) -> None:
    swarm = Swarm(tmp_path)
    async with (
        swarm.apart(TRAINER) as bootstrap,
        swarm.apart(ALICE) as peer,
        trio.open_nursery() as nursery,
    ):
        node, began = peer.node, trio.current_time()
        await node.transport.disconnect(TRAINER.peer_id)
        swarm.network.full.add(TRAINER.peer_id)
        addresses = bootstrap.node.transport.addresses()
        node.settings = PeerSettings(role=["inference"], bootstrap=list(addresses))
        waiting = partial(join_network, node, room_seconds=joining.ROOM_DEADLINE_SECONDS)
        if has_room_after is None:
            with pytest.raises(PeerError, match="it closed the connection at once"):
                await waiting()
            assert trio.current_time() - began == joining.ROOM_DEADLINE_SECONDS
        else:

            async def make_room() -> None:
                await trio.sleep(has_room_after)
                swarm.network.full.clear()

            nursery.start_soon(make_room)
            assert await waiting() == {TRAINER.peer_id: list(addresses)}
        (said,) = peer.events("dht.bootstrap_full")
        assert said["remote"] == TRAINER.peer_id
        assert said["seconds"] == joining.ROOM_DEADLINE_SECONDS
        nursery.cancel_scope.cancel()


async def test_silent_bootstrap_peers_delay_no_manifest(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    gone = [identity(number) for number in range(60, 66)]
    message = msgspec.structs.replace(Run(swarm.manifest).manifest, version=2)
    newer = sealed(OWNER, message, swarm.run, sequence=2)
    async with trio.open_nursery() as nursery, swarm.apart(TRAINER) as living:

        async def stalled(key: Identity, *, task_status: trio.TaskStatus[str]) -> None:
            async with swarm.apart(key) as peer:
                task_status.started(peer.node.transport.addresses()[0])
                await trio.sleep_forever()

        addresses = [await nursery.start(stalled, key) for key in gone]
        living.run_node.versions.hear(newer)
        addresses += living.node.transport.addresses()
        async with swarm.apart(ALICE) as peer:
            for key in gone:
                swarm.network.cut(key.peer_id, ALICE.peer_id)
            peer.node.settings = PeerSettings(role=["validator"], bootstrap=addresses)
            nursery.start_soon(peer.run_node.versions.compare_with_bootstrap)
            await trio.sleep(BOOTSTRAP_SECONDS + 1)
            assert peer.run_node.run.manifest.version == 2
            await trio.sleep(BOOTSTRAP_SECONDS)
            silent = peer.events("dht.bootstrap_silent")
            assert {each["remote"] for each in silent} == {each.peer_id for each in gone}
            await trio.sleep(4 * BOOTSTRAP_SECONDS)
            assert len(peer.events("dht.bootstrap_silent")) == len(gone), "each is said once"
            for key in gone:
                swarm.network.heal(key.peer_id, ALICE.peer_id)
            await trio.sleep(2 * BOOTSTRAP_SECONDS)
            assert not peer.run_node.versions._silent
            nursery.cancel_scope.cancel()


async def test_a_list_is_tried_side_by_side_and_the_dead_are_named(tmp_path: Path) -> None:
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{identity(61).peer_id}"
    swarm = Swarm(tmp_path)
    async with swarm.apart(TRAINER) as bootstrap, swarm.apart(ALICE) as peer:
        node = peer.node
        await node.transport.disconnect(TRAINER.peer_id)
        listed = [dead, *bootstrap.node.transport.addresses()]
        node.settings = PeerSettings(role=["inference"], bootstrap=listed)
        assert list(await join_network(node)) == [TRAINER.peer_id]
        (said,) = peer.events("dht.bootstrap_partly_silent")
        (reason,) = said["reasons"]
        assert reason.startswith(f"{dead}: ")
        await node.transport.disconnect(TRAINER.peer_id)
        node.settings = PeerSettings(role=["inference"], bootstrap=[dead])
        with pytest.raises(PeerError, match=dead):
            await join_network(node)
