"""Who is evicted gets nothing any more, soon: real peers of a run, and a former member that goes on
asking with the lease it has."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
import trio.testing

from swarm.run.admission import ADMISSION_LEASE_SECONDS
from swarm.shardcast import limits
from swarm.transport import BlobReference, FetchError, Source
from swarm.wire.identity import Identity, PeerId
from tests.ledger.harness import ALICE, BOB, TRAINER, WORKER, Peer, Swarm

PIECES = 4


async def publish(peer: Peer) -> list[BlobReference]:
    """Have a peer hold a checkpoint; its pieces."""
    data = random.Random(1).randbytes(PIECES * limits.PIECE_BYTES_MIN)
    await peer.node.disk.write("made/model.safetensors", data)
    held = await peer.run_node.store.publish("made", 0, 0)
    return [BlobReference(piece.digest, piece.size_bytes) for piece in held.manifest.pieces]


async def lease(swarm: Swarm) -> bytes:
    """What the worker, as an honest peer, is given by the run's trusted peers just now."""
    async with swarm.peer(WORKER) as worker:
        await worker.until(lambda: bool(worker.node.transport._credential), "no lease")  # type: ignore[attr-defined]
        return worker.node.transport._credential  # type: ignore[attr-defined]


class Robber:
    """The worker's key and lease in the hands of a program that never leaves."""

    def __init__(self, peer: Peer, credential: bytes, *, reconnects: bool) -> None:
        self._peer = peer
        self._reconnects = reconnects
        self.served_at: dict[PeerId, float] = {}
        """When it last was given a piece by each."""
        self.refused: dict[PeerId, str] = {}
        """What it is told since."""
        peer.node.transport.set_credential(credential)

    async def rob(self, robbed: Peer, pieces: list[BlobReference]) -> None:
        """Ask for piece after piece, for ever."""
        server = robbed.node.peer_id
        source = Source(server, tuple(robbed.node.transport.bulk_addresses()))
        transport, disk = self._peer.node.transport, self._peer.node.disk
        await disk.allocate(server, pieces[0].size_bytes)
        for number in range(1_000_000):
            piece = pieces[number % PIECES]
            try:
                await transport.fetch(source, piece, disk.sink(server, 0, piece.size_bytes))
                self.served_at[server] = trio.current_time()
                self.refused.pop(server, None)
            except FetchError as error:
                self.refused[server] = str(error)
            if self._reconnects:
                await transport.disconnect(server)
            await trio.sleep(0.25)


@pytest.mark.parametrize("reconnects", [False, True])
async def test_gossip_cuts_an_evicted_peer_off_in_the_middle(
    tmp_path: Path, reconnects: bool
) -> None:
    """On a new connection at once; on one that it has when it is disconnected."""
    swarm = Swarm(tmp_path)
    async with swarm.peer(TRAINER) as trainer, swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        servers = (trainer, alice, bob)
        pieces = [await publish(server) for server in servers]
        credential = await lease(swarm)
        async with swarm.apart(WORKER) as peer, trio.open_nursery() as nursery:
            robber = Robber(peer, credential, reconnects=reconnects)
            for server, some in zip(servers, pieces, strict=True):
                nursery.start_soon(robber.rob, server, some)
            await trio.sleep(5)
            assert robber.refused == {}
            began = trio.current_time()
            await alice.trusted.evict(WORKER.peer_id, "for a test", b"", 1.0, 0.0)
            await trio.sleep(10)
            for server in servers:
                assert server.events("membership.peer_evicted")
            nursery.cancel_scope.cancel()
    limit = 1.0 if reconnects else 5.0
    for key in (TRAINER, ALICE, BOB):
        assert robber.served_at[key.peer_id] < began + limit
        assert "403" in robber.refused[key.peer_id]


async def test_where_gossip_does_not_reach_the_lease_runs_out(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(TRAINER) as trainer, swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        pieces = await publish(bob)
        credential = await lease(swarm)
        for other in (trainer, alice):
            swarm.network.sever(bob.node.peer_id, other.node.peer_id)
        async with swarm.apart(WORKER) as peer, trio.open_nursery() as nursery:
            robber = Robber(peer, credential, reconnects=True)
            nursery.start_soon(robber.rob, bob, pieces)
            began = trio.current_time()
            await alice.trusted.evict(WORKER.peer_id, "for a test", b"", 1.0, 0.0)
            await trio.sleep(ADMISSION_LEASE_SECONDS + 5)
            assert trainer.events("membership.peer_evicted")
            assert not bob.events("membership.peer_evicted")
            nursery.cancel_scope.cancel()
    assert 50.0 < robber.served_at[BOB.peer_id] - began < 60.0
    assert "403 this peer is not admitted" in robber.refused[BOB.peer_id]


async def test_those_who_admit_nobody_forget_old_evictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Identities are free, and each may be evicted once."""
    monkeypatch.setattr("swarm.node.evictions.EVICTIONS_KEPT", 3)
    swarm = Swarm(tmp_path)
    evil = [Identity(bytes([number]) * 32).peer_id for number in range(100, 106)]

    def known(peer: Peer) -> list[str]:
        return [each for each in evil if peer.run_node.run.evicted(each) is not None]

    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob, swarm.peer(WORKER) as worker:
        for each in evil:
            await alice.trusted.evict(each, "for a test", b"", 1.0, 0.0)
            await trio.sleep(1)
        assert known(worker) == evil[-3:]
        assert known(alice) == known(bob) == evil
