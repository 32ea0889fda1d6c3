"""Adversaries: malicious peers, each a role like the honest roles, on the same seam.

An adversary knows everything that an admitted peer knows, and runs the production code to get that
far; then it makes one attack. Its docstring says how the attack ends, and tests/simnet show it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ClassVar, cast

import msgspec
import trio
from blake3 import blake3

from peers.inference.delivery import Deliveries, Parcel
from peers.inference.role import InferenceRole
from peers.relay import RelayRole
from simnet.compute import TOKENIZER, WEIGHTS, SimulatedRollouts
from simnet.disk import SimulatedDisk
from simnet.extents import Symbol
from simnet.flows import Link
from simnet.simulation import Plan
from swarm.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.errors import PeerError
from swarm.gossip.frames import Push
from swarm.gossip.topics import RUN, WORK
from swarm.identity import Identity, PeerId, peer_id_bytes
from swarm.jobs import Generate, Generated, InferenceService
from swarm.kademlia import wire
from swarm.kademlia.dht import Kademlia
from swarm.kademlia.routing_table import BUCKET_SIZE, key_id, node_id
from swarm.messages import (
    Acknowledgement,
    Checkpoint,
    CheckpointReference,
    Message,
    PeerRecord,
    StepOrder,
    Submission,
)
from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import rendezvous
from swarm.run.records import peer_key, record_validators, run_key
from swarm.shardcast.have.messages import PROTOCOL as HAVE
from swarm.shardcast.have.messages import Complete
from swarm.shardcast.have.messages import encode as encode_have
from swarm.transport import (
    BlobReference,
    Framing,
    OpenBlob,
    Refused,
    Source,
    Stream,
    StreamError,
    Transport,
)

ATTACK_SECONDS = 5.0
"""Time between two attempts of a repeated attack."""

FLOOD_FRAMES = 200
"""Announcements in one burst of a flood."""

CROWD = BUCKET_SIZE
"""Number of identities that can be all holders of a record."""

GROUND = 1024
"""Identities drawn to find the nearest to two keys: enough to be nearer than any of 50 peers."""

LORIS_BYTES_PER_SECOND = 0.2
"""Less than one byte within the receiver's patience for a silent sender."""


class Adversary:
    """Joins like a relay, follows all announcements, and attacks every few seconds."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._heard: list[Envelope] = []
        for kind in (Checkpoint, StepOrder):
            peer.gossip.listen(kind, self._hear)

    def _hear(self, envelope: Envelope) -> None:
        self._heard = [*self._heard[-99:], envelope]

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._peer.policies.follow)
            while True:
                await trio.sleep(ATTACK_SECONDS)
                await self.attack()

    async def attack(self) -> None:
        """Attack once; does nothing where wrong answers are the whole attack."""
        await trio.lowlevel.checkpoint()

    def push(self, *envelopes: bytes) -> None:
        """Send envelopes to every neighbour, bypassing this peer's own checks."""
        for neighbour in list(self._peer.gossip._slots.neighbours.values()):
            for raw in envelopes:
                self._peer.gossip._post(neighbour, Push(raw))

    async def claim(self, sender: str, message: Message) -> bytes:
        """Make an envelope that names `sender` but is signed with this peer's own key."""
        mine = await self._peer.seal(message, STATE_LIFETIME_SECONDS)
        body = msgspec.structs.replace(mine.body, sender=sender)
        return mine.raw[:64] + msgspec.msgpack.encode(body)


class Forger(Adversary):
    """Announces its own weights as the trainer's next policy, in the trainer's name, and orders
    work with them. *Caught*: bad signatures; its neighbours ban it."""

    async def attack(self) -> None:
        orders = [heard for heard in self._heard if isinstance(heard.message, StepOrder)]
        if not orders or not self._peer.store.complete():
            return
        order = cast(StepOrder, orders[-1].message)
        held = await self._make(order)
        trainer = self._peer.run.manifest.trainers[0].peer
        forged = msgspec.structs.replace(
            order,
            step=order.step + 1,
            revision=0,
            checkpoint=CheckpointReference(
                lineage=order.lineage,
                step=order.policy + 1,
                digest=held.digest,
                size_bytes=held.manifest_bytes,
            ),
        )
        self.push(await self.claim(trainer, forged))

    async def _make(self, order: StepOrder) -> Any:
        """Make a checkpoint of garbage that claims to be the next policy."""
        disk = cast(SimulatedDisk, self._peer.node.disk)
        folder = f"forged/{order.policy + 1}"
        if not disk.exists(folder):
            size = disk.size_bytes(f"{self._newest_folder()}/{WEIGHTS}")
            disk.put(f"{folder}/{WEIGHTS}", 0, Symbol("rubbish", 0, size))
            disk.put(f"{folder}/tokenizer.json", 0, TOKENIZER)
        held = self._peer.store.held((order.lineage, order.policy + 1))
        if held is not None:
            return held
        held, _ = await self._peer.store.publish(folder, order.lineage, order.policy + 1)
        return held

    def _newest_folder(self) -> str:
        held = self._peer.store.held(self._peer.store.complete()[-1])
        assert held is not None
        return held.folder


class Replayer(Adversary):
    """Replays old messages of trusted peers, and sends its own messages dated in the future or of
    another run. *Harmless*: dropped as old state, issued in the future, or wrong run."""

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


class Flooder(Adversary):
    """Sends hundreds of valid announcements at once, and opens streams without end. *Harmless*:
    senders' rates and streams are limited, and the run continues."""

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


def answer_dht(transport: Transport, answer: Callable[[wire.Message], wire.Message | None]) -> None:
    """Make a peer answer every DHT request with `answer`; None is silence."""

    async def serve(stream: Stream) -> None:
        while (raw := await stream.receive()) is not None:
            said = answer(wire.decode(raw))
            if said is not None:
                await stream.send(wire.encode(said))

    cast(Any, transport)._handlers.pop(wire.PROTOCOL, None)
    transport.serve(wire.PROTOCOL, serve, Framing.DELIMITED)


class Poisoner(Adversary):
    """Answers every DHT request with lies: itself as the closest peer and as a provider of
    everything, and unsigned records. *Harmless*: records are verified, lookups take disjoint paths,
    and peers drop a provider that sends nothing."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        answer_dht(peer.node.transport, self._lie)

    def _lie(self, question: wire.Message) -> wire.Message:
        transport = self._peer.node.transport
        me = wire.peer_to_wire(wire.Neighbour(transport.peer_id, tuple(transport.addresses())))
        answer = wire.Message(question.type, question.key, closer_peers=(me,))
        if question.type is wire.MessageType.GET_VALUE:
            rubbish = wire.Record(question.key, b"\0" * 200)
            return dataclasses.replace(answer, record=rubbish)
        if question.type is wire.MessageType.GET_PROVIDERS:
            return dataclasses.replace(answer, provider_peers=(me,))
        return answer


class Silent(Adversary):
    """Keeps connections and streams open and never answers the DHT. *Harmless*: each request has
    a deadline, and a peer that misses it twice is dropped from the contacts."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        answer_dht(peer.node.transport, lambda _: None)


class Sybil(Adversary):
    """One machine with many identities in one /24 that serve the DHT, accept every record, return
    none and name only each other. *Harmless*: a bucket, and the answer of a lookup, has room for
    two peers of a /24."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._crowd: dict[PeerId, wire.Neighbour] = {}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            for identity, host in self._identities():
                nursery.start_soon(self._live, identity, host)

    def _identities(self) -> Iterator[tuple[Identity, str | None]]:
        """The crowd's identities, and the host of each (None: in a /24 of its own)."""
        network = cast(Any, self._peer.node.transport).host.rpartition(".")[0]
        for number in range(CROWD):
            yield Identity(self._peer.node.world.secret_bytes(32)), f"{network}.{number + 2}"

    async def _live(self, identity: Identity, host: str | None) -> None:
        node = self._peer.node
        mine = cast(Any, node.transport)
        async with (
            mine._network.transport(
                identity, world=node.world, disk=node.disk, line=mine.line, host=host
            ) as transport,
            trio.open_nursery() as nursery,
        ):
            itself = wire.Neighbour(transport.peer_id, tuple(transport.addresses()))
            self._crowd[transport.peer_id] = itself
            answer_dht(transport, lambda question: self._lie(itself, question))
            checks = record_validators(node.world.wall_time)
            dht = Kademlia(transport, node.world, checks, server=False)
            await nursery.start(dht.run)
            while True:
                try:  # a peer that asks is asked back, and becomes a contact
                    await dht.bootstrap(node.settings.bootstrap)
                except PeerError:
                    await trio.sleep(ATTACK_SECONDS)
                else:
                    await trio.sleep_forever()

    def _lie(self, itself: wire.Neighbour, question: wire.Message) -> wire.Message:
        key = question.key
        if question.type is wire.MessageType.PUT_VALUE:
            return question
        near = sorted(self._crowd.values(), key=lambda other: node_id(other.peer) ^ key_id(key))
        named = [itself] if key == peer_id_bytes(itself.peer) else near[:CROWD]
        others = tuple(map(wire.peer_to_wire, named))
        return wire.Message(question.type, key, closer_peers=others)


class Eclipser(Sybil):
    """Like `Sybil`, but in many networks, and with identities ground until they are nearer to the
    trainer's or the run's record than honest peers are."""

    def _identities(self) -> Iterator[tuple[Identity, str | None]]:
        run, secret = self._peer.run, self._peer.node.world.secret_bytes
        drawn = [Identity(secret(32)) for _ in range(GROUND)]
        for key in (run_key(run.id), peer_key(run.manifest.trainers[0].peer)):
            drawn.sort(key=lambda identity: node_id(identity.peer_id) ^ key_id(key))
            yield from ((identity, None) for identity in drawn[:CROWD])
            del drawn[:CROWD]


class CorruptRelay(RelayRole):
    """Fetches every checkpoint and serves corrupted pieces. *Caught*: every piece is hashed; each
    attempt wastes one piece, and the relay loses its standing as a source."""

    async def run(self) -> None:
        disk = cast(SimulatedDisk, self._peer.node.disk)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            while True:
                await trio.sleep(1.0)
                for key in self._peer.store.complete():
                    held = self._peer.store.held(key)
                    path = f"{held.folder}/{WEIGHTS}" if held is not None else ""
                    if held is not None and disk.exists(path):
                        disk.put(path, 0, Symbol("rubbish", 0, disk.size_bytes(path)))


class EquivocatingRelay(RelayRole):
    """Claims to hold every piece, and serves none. *Caught*: a source that claims a piece and
    refuses it has failed, and is asked ever more rarely."""

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
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            while True:
                await trio.sleep(ATTACK_SECONDS)
                newest = self._peer.newest_checkpoint()
                if newest is not None:
                    await self._boast(newest.reference.digest)

    async def _boast(self, manifest: bytes) -> None:
        transport = self._peer.node.transport
        for peer in transport.connected():
            try:
                stream = await transport.open_stream(peer, HAVE)
                await stream.send(encode_have([Complete(manifest)]))
            except StreamError:
                continue


class SlowLoris(RelayRole):
    """Fetches and offers every checkpoint, accepts every request, and sends a byte now and then.
    *Harmless*: late pieces are requested from other peers as well, and a transfer below the minimum
    rate is cancelled."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        cast(Any, peer.node.transport).uplink = Link(LORIS_BYTES_PER_SECOND)


def _push_nothing(peer: RunNode) -> None:
    async def keep(target: Source, reference: BlobReference, path: str) -> None:
        await trio.lowlevel.checkpoint()

    cast(Any, peer.node.transport).push = keep


class Withholder(InferenceRole):
    """Announces submissions and never delivers their files. *Caught*: refused by check `file`."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        _push_nothing(peer)


class SubmissionFlooder(InferenceRole):
    """Also delivers every submission under numbers that no order asked for. *Caught*: refused by
    check `number`; its quota of unjudged files bounds the cost."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        messenger = peer.messenger
        request: Callable[..., Awaitable[Any]] = messenger.request

        async def request_often(to: PeerId, envelope: Envelope, *more: Any, **how: Any) -> Any:
            if isinstance(envelope.message, Submission):
                for number in range(1000, 1003):
                    again = msgspec.structs.replace(envelope.message, number=number)
                    await request(to, await peer.seal(again, STATE_LIFETIME_SECONDS), *more, **how)
            return await request(to, envelope, *more, **how)

        cast(Any, messenger).request = request_often


class DoubleDeliverer(InferenceRole):
    """Sends the last validator in rank a second file under every number. It differs in one group,
    so that it hashes differently and passes every check. *Harmless*: a trainer takes one file per
    number, and only that file is credited."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._deliveries = DoubleDeliveries(peer)


class DoubleDeliveries(Deliveries):
    """The deliveries of a `DoubleDeliverer`."""

    async def see_through(
        self,
        submission: Submission,
        nonce: bytes,
        path: str,
        ordered: Envelope | None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        disk, manifest = self._node.disk, self._run.manifest
        rollouts = msgspec.msgpack.decode(await disk.read(path), type=SimulatedRollouts)
        raw = msgspec.msgpack.encode(
            msgspec.structs.replace(rollouts, lengths=rollouts.lengths[:-1])
        )
        await disk.write(f"{path}.second", raw)
        digest = blake3(raw).digest()
        second = msgspec.structs.replace(
            submission, digest=digest, size_bytes=len(raw), groups=submission.groups - 1
        )
        worker, number = self._peer.peer_id.encode(), submission.number.to_bytes(8, "big")
        last = rendezvous(manifest.validator_ids(), nonce, worker, number)[-1]
        announced = await self._peer.seal(second, STATE_LIFETIME_SECONDS)
        reference = BlobReference(digest, len(raw))
        await self.deliver(PeerId(last), Parcel(announced, reference, f"{path}.second", ordered))
        await super().see_through(submission, nonce, path, ordered, task_status=task_status)


class Copier(InferenceRole):
    """Hands in another worker's files as its own, byte for byte, while that worker delivers them.
    The files follow from the seed, so any peer with the weights can make them. *Caught*: by
    `header`, which names the maker, and evicted; the other worker is credited."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._victim = peer.peer_id
        peer.gossip.listen(Acknowledgement, self._hear)

    def _hear(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Acknowledgement)
        self._victim = PeerId(envelope.message.worker)

    async def _make_submission(
        self, engine: InferenceService, order: StepOrder, nursery: trio.Nursery
    ) -> None:
        await super()._make_submission(_EngineOf(engine, self._victim), order, nursery)


class _EngineOf:
    """An engine that generates another worker's files instead of the peer's own."""

    def __init__(self, engine: InferenceService, worker: PeerId) -> None:
        self._engine = engine
        self._worker = worker
        self.load, self.probe = engine.load, engine.probe

    async def generate(self, job: Generate) -> Generated:
        order = msgspec.structs.replace(job.order, worker=self._worker)
        return await self._engine.generate(msgspec.structs.replace(job, order=order))


class Claimant(Copier):
    """Announces another worker's files as its own and delivers none. *Caught*: refused by check
    `file`; the other worker's file is not affected."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        _push_nothing(peer)


class Cheater(InferenceRole):
    """Generates with other weights (`fabricates="weights"`), delivers malformed files
    (`"garbage"`), or rollouts that its seed does not give (`"prompts"`). *Caught*: by `proofs`,
    `schema` or `header`, and evicted."""


KINDS: dict[str, tuple[type[Any], list[str], str]] = {
    "forger": (Forger, ["relay"], ""),
    "replayer": (Replayer, ["relay"], ""),
    "flooder": (Flooder, ["relay"], ""),
    "poisoner": (Poisoner, ["relay"], ""),
    "silent": (Silent, ["relay"], ""),
    "sybil": (Sybil, ["relay"], ""),
    "eclipser": (Eclipser, ["relay"], ""),
    "corrupt-relay": (CorruptRelay, ["relay"], ""),
    "equivocating-relay": (EquivocatingRelay, ["relay"], ""),
    "slow-source": (RelayRole, ["relay"], ""),
    "slow-loris": (SlowLoris, ["relay"], ""),
    "withholder": (Withholder, ["inference"], ""),
    "submission-flooder": (SubmissionFlooder, ["inference"], ""),
    "double-deliverer": (DoubleDeliverer, ["inference"], ""),
    "copier": (Copier, ["inference"], ""),
    "claimant": (Claimant, ["inference"], ""),
    "wrong-weights": (Cheater, ["inference"], "weights"),
    "malformed-files": (Cheater, ["inference"], "garbage"),
    "other-prompts": (Cheater, ["inference"], "prompts"),
}
"""By name: (role class, the roles it claims, what its engine fabricates)."""

SLOW_BYTES_PER_SECOND = 1000.0
"""The uplink of a slow source."""


def disguise(plan: Plan, kind: str) -> Plan:
    """Turn a peer's plan into an adversary's."""
    acts, roles, fabricates = KINDS[kind]
    line = plan.line
    if kind == "slow-source":
        line = dataclasses.replace(line, uplink_bytes_per_second=SLOW_BYTES_PER_SECOND)
    return dataclasses.replace(plan, roles=roles, acts=acts, fabricates=fabricates, line=line)
