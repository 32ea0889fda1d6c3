from __future__ import annotations

import pytest
import trio

from swarm.shardcast.manifest import digest_of
from swarm.shardcast.service import BlobService
from swarm.transport import BlobReference, FetchError, Refused
from swarm.wire.identity import Identity, PeerId
from swarm.world import Sink
from tests.memory_network import MemoryNetwork
from tests.shardcast.harness import Peer, peers
from tests.shardcast.memory_disk import MemoryDisk


async def test_only_known_names_are_served() -> None:
    disk = MemoryDisk()
    service = BlobService(lambda peer, credential: True)
    await disk.write("submissions/a", b"rollouts")
    digest = digest_of(b"rollouts")
    with pytest.raises(Refused, match="unknown blob") as refused:
        service.open(None, digest)
    assert refused.value.status == 404
    service.register(digest, "submissions/a", 0, 8)
    blob = service.open(None, digest)
    assert (blob.path, blob.offset, blob.size_bytes) == ("submissions/a", 0, 8)
    service.unregister(digest)
    service.unregister(digest)
    with pytest.raises(Refused):
        service.open(None, digest)
    with pytest.raises(Refused, match="does not accept submissions"):
        service.accept(None, BlobReference(digest, 8))


async def test_a_piece_still_missing_is_answered_with_not_yet() -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (trainer, relay):
        checkpoint = await trainer.publish(0, {"a": b"weights"})
        held = trainer.store.held((0, 0))
        assert held is not None
        wanted = held.manifest.pieces[0].digest
        trainer.service.open = lambda who, digest: BlobService.open(  # type: ignore[assignment, method-assign]
            trainer.service, who, b"unknown" if digest == wanted else digest
        )
        with trio.move_on_after(3):
            await relay.fetcher.fetch(checkpoint, lambda: [trainer.source])
        with pytest.raises(Refused, match="not yet") as refused:
            relay.service.open(None, wanted)
        assert refused.value.status == 404
        await trainer.disk.allocate("x", 7)
        sink = trainer.disk.sink("x", 0, 7)
        with pytest.raises(FetchError, match="404 not yet") as failed:
            await trainer.transport.fetch(relay.source, BlobReference(wanted, 7), sink)
        assert failed.value.retry


def test_membership_decides_who_is_admitted() -> None:
    asked: list[tuple[PeerId | None, bytes]] = []

    def admits(who: PeerId | None, credential: bytes) -> bool:
        asked.append((who, credential))
        return credential == b"admission"

    service = BlobService(admits)
    member = Identity(bytes(32)).peer_id
    assert service.admits(member, b"admission")
    assert not service.admits(None, b"")
    assert asked == [(member, b"admission"), (None, b"")]


class _Inbox:
    """Takes up to 100 bytes from any client."""

    def __init__(self, owner: Peer) -> None:
        self.owner = owner

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        if reference.size_bytes > 100:
            raise Refused(413, "a submission has at most 100 bytes")
        self.owner.disk.put("inbox", 0, bytes(reference.size_bytes))
        return self.owner.disk.sink("inbox", 0, reference.size_bytes)


async def test_the_inbox_of_a_role_decides_on_pushes() -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (worker, validator):
        await worker.disk.write("mine", b"rollouts")
        await worker.disk.write("big", bytes(101))
        reference = BlobReference(digest_of(b"rollouts"), 8)
        with pytest.raises(FetchError, match="does not accept submissions"):
            await worker.transport.push(validator.source, reference, "mine")
        await validator.disk.allocate("blob", 1)
        validator.service.inbox = _Inbox(validator)
        await worker.transport.push(validator.source, reference, "mine")
        assert await validator.disk.read("inbox") == b"rollouts"
        with pytest.raises(FetchError, match="413 a submission has at most 100 bytes"):
            await worker.transport.push(
                validator.source, BlobReference(digest_of(bytes(101)), 101), "big"
            )
