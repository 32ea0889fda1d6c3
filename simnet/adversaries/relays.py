"""Relays that attack pieces, gossip, the DHT or memory."""

import dataclasses
from typing import Any, cast

import msgspec

from peers.relay import RelayRole
from simnet.adversaries.base import Adversary, Kind, answer_dht, beside
from simnet.compute.setting import TOKENIZER, WEIGHTS
from simnet.disk import SimulatedDisk
from simnet.extents import Symbol
from simnet.flows import Link
from swarm.kademlia import wire
from swarm.node.run_node import RunNode
from swarm.shardcast.have.claims import PROTOCOL as HAVE
from swarm.shardcast.have.claims import Complete, encode
from swarm.shardcast.held import Held
from swarm.transport import BlobReference, OpenBlob, Refused, StreamError
from swarm.wire.envelope import STATE_LIFETIME_SECONDS
from swarm.wire.identity import PeerId
from swarm.wire.messages import PeerRecord, StepOrder


class CorruptRelay(RelayRole):
    """Fetches every checkpoint and serves corrupted pieces."""

    async def run(self) -> None:
        await beside(super().run, self._corrupt, 1.0)

    async def _corrupt(self) -> None:
        disk = cast(SimulatedDisk, self._peer.node.disk)
        for key in self._peer.store.complete():
            held = self._peer.store.held(key)
            path = f"{held.folder}/{WEIGHTS}" if held is not None else ""
            if held is not None and disk.exists(path):
                disk.put(path, 0, Symbol("rubbish", 0, disk.size_bytes(path)))


class EquivocatingRelay(RelayRole):
    """Claims to hold every piece, and serves none."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        bulk = cast(Any, peer.node.transport)
        self._honest = bulk._service
        bulk._service = self

    def admits(self, peer: PeerId | None, credential: bytes) -> bool:
        return bool(self._honest.admits(peer, credential))

    def open(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        raise Refused(404, "not yet")

    def accept(self, client: PeerId | None, reference: BlobReference) -> Any:
        raise Refused(403, "this peer accepts no pushed blobs")

    async def run(self) -> None:
        await beside(super().run, self._boast)

    async def _boast(self) -> None:
        newest, transport = self._peer.newest_checkpoint(), self._peer.node.transport
        if newest is None:
            return
        claim = encode([Complete(newest.reference.digest)])
        for peer in transport.connected():
            try:
                await (await transport.open_stream(peer, HAVE)).send(claim)
            except StreamError:
                continue


FLOOD_FRAMES = 200
"""Announcements in one burst."""


class Flooder(Adversary):
    """Sends hundreds of valid announcements at once, and opens streams without end."""

    async def attack(self) -> None:
        record = PeerRecord(roles=["relay"], addresses=[])
        raws = [
            (await self._peer.seal(record, STATE_LIFETIME_SECONDS)).raw for _ in range(FLOOD_FRAMES)
        ]
        self.push(*raws)
        transport = self._peer.node.transport
        for peer in transport.connected():
            for _ in range(20):
                try:
                    await transport.open_stream(peer, HAVE)
                except StreamError:
                    break


class Forger(Adversary):
    """Announces its own weights as the trainer's next policy, in its name, and orders work."""

    async def attack(self) -> None:
        orders = [heard for heard in self._heard if isinstance(heard.message, StepOrder)]
        if not orders or not self._peer.store.complete():
            return
        order = cast(StepOrder, orders[-1].message)
        held = await self._make(order)
        trainer = self._peer.run.manifest.trainers[0].peer
        forged = msgspec.structs.replace(
            order, step=order.step + 1, revision=0, checkpoint=held.reference
        )
        self.push(await self.claim(trainer, forged))

    async def _make(self, order: StepOrder) -> Held:
        disk = cast(SimulatedDisk, self._peer.node.disk)
        folder = f"forged/{order.policy + 1}"
        if not disk.exists(folder):
            newest = self._peer.store.held(self._peer.store.complete()[-1])
            assert newest is not None
            size = disk.size_bytes(f"{newest.folder}/{WEIGHTS}")
            disk.put(f"{folder}/{WEIGHTS}", 0, Symbol("rubbish", 0, size))
            disk.put(f"{folder}/tokenizer.json", 0, TOKENIZER)
        held = self._peer.store.held((order.lineage, order.policy + 1))
        if held is not None:
            return held
        return await self._peer.store.publish(folder, order.lineage, order.policy + 1)


class Poisoner(Adversary):
    """Answers every DHT request with lies: itself as the closest peer and as a provider of
    everything, and unsigned records."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        answer_dht(peer.node.transport, self._lie)

    def _lie(self, question: wire.Message) -> wire.Message:
        transport = self._peer.node.transport
        me = wire.Neighbour(transport.peer_id, tuple(transport.addresses()))
        answer = wire.Message(question.type, question.key, closer_peers=(me,))
        if question.type is wire.MessageType.GET_VALUE:
            return dataclasses.replace(answer, record=wire.Record(question.key, b"\0" * 200))
        if question.type is wire.MessageType.GET_PROVIDERS:
            return dataclasses.replace(answer, provider_peers=(me,))
        return answer


class Replayer(Adversary):
    """Replays old messages of trusted peers, and sends its own of the future or of another run."""

    async def attack(self) -> None:
        record = PeerRecord(roles=["relay"], addresses=[])
        mine = await self._peer.seal(record, STATE_LIFETIME_SECONDS)
        ahead = msgspec.structs.replace(mine.body, issued_ms=mine.body.issued_ms + 10**7)
        other = msgspec.structs.replace(mine.body, run="somebody/else")
        mine_again = [self._sign(body) for body in (ahead, other)]
        self.push(*(heard.raw for heard in self._heard[:10]), *mine_again)

    def _sign(self, body: Any) -> bytes:
        encoded = msgspec.msgpack.encode(body)
        signed = f"swarm/1/{body.kind}\0".encode() + encoded
        return self._peer.node.identity.sign(signed) + encoded


class Silent(Adversary):
    """Keeps connections and streams open and never answers the DHT."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        answer_dht(peer.node.transport, lambda _: None)


BYTES_PER_SECOND = 0.2
"""Less than one byte within the receiver's patience for a silent sender."""


class SlowLoris(RelayRole):
    """Fetches and offers every checkpoint, accepts every request, and sends a byte now and then."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        cast(Any, peer.node.transport).uplink = Link(BYTES_PER_SECOND)


KINDS = {
    "corrupt-relay": Kind(CorruptRelay),
    "equivocating-relay": Kind(EquivocatingRelay),
    "flooder": Kind(Flooder),
    "forger": Kind(Forger),
    "poisoner": Kind(Poisoner),
    "replayer": Kind(Replayer),
    "silent": Kind(Silent),
    "slow-loris": Kind(SlowLoris),
    # Serves at 1 kB/s.
    "slow-source": Kind(RelayRole, uplink_bytes_per_second=1000.0),
}
