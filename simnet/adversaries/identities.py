"""Many identities for one machine."""

from collections.abc import Iterator
from typing import Any, ClassVar, cast

import trio

from simnet.adversaries.base import ATTACK_SECONDS, Adversary, Kind, answer_dht, second_identity
from swarm.errors import PeerError
from swarm.kademlia import wire
from swarm.kademlia.dht import Kademlia
from swarm.kademlia.routing_table import BUCKET_SIZE, key_id, node_id
from swarm.node.run_node import RunNode
from swarm.run.records import peer_key, record_validators, run_key
from swarm.wire.envelope import Gate, seal
from swarm.wire.identity import Identity, PeerId, peer_id_bytes
from swarm.wire.messages import Admission, Heartbeat
from swarm.wire.messenger import Messenger, first

CROWD = BUCKET_SIZE
"""Number of identities that can be all holders of a record."""


class Sybil(Adversary):
    """One machine with many identities in one /24 that serve the DHT, accept every record, return
    none and name only each other."""

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
        async with second_identity(self._peer, identity, host) as (transport, nursery):
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
        return wire.Message(question.type, key, closer_peers=tuple(named))


GROUND = 1024
"""Identities drawn to find the nearest to two keys: enough to be nearer than any of 50 peers."""


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


IDLE_CROWD = 40


class IdleIdentities(Adversary):
    """A crowd of identities on one machine that say heartbeats to every trusted peer, as long words
    as they may, and deliver nothing."""

    roles: ClassVar[list[str]] = ["inference"]
    admitted: ClassVar[set[str]] = set()

    async def run(self) -> None:
        network = cast(Any, self._peer.node.transport).host.rpartition(".")[0]
        async with trio.open_nursery() as nursery:
            for number in range(IDLE_CROWD):
                identity = Identity(self._peer.node.world.secret_bytes(32))
                nursery.start_soon(self._live, identity, f"{network}.{number + 2}")

    async def _live(self, identity: Identity, host: str) -> None:
        node, run = self._peer.node, self._peer.run
        async with second_identity(self._peer, identity, host) as (transport, nursery):
            gate = Gate(node.world, run.id, run.permits, run.trusts)
            messenger = Messenger(transport, gate, node.events)
            await nursery.start(messenger.run)
            beat = Heartbeat(roles=self.roles, doing="\x1b" * 80, bytes_sent=2**53)
            for sequence in range(10**6):
                for trusted in run.manifest.trusted_ids():
                    record = node.record(trusted)
                    envelope = seal(
                        identity,
                        beat,
                        run=run.id,
                        sequence=sequence + 1,
                        wall_time=node.world.wall_time(),
                        lifetime_seconds=60,
                    )
                    try:
                        if record is not None:
                            await transport.connect(PeerId(trusted), record.addresses)
                            reply = await messenger.request(PeerId(trusted), envelope)
                            if first(reply, Admission) is not None:
                                self.admitted.add(identity.peer_id)
                    except PeerError:
                        continue
                await trio.sleep(5.0)


KINDS = {"sybil": Kind(Sybil), "eclipser": Kind(Eclipser), "idle-identities": Kind(IdleIdentities)}
