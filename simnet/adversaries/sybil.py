from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import trio

from simnet.adversaries.base import ATTACK_SECONDS, Adversary, Kind, answer_dht
from swarm.errors import PeerError
from swarm.kademlia import wire
from swarm.kademlia.dht import Kademlia
from swarm.kademlia.routing_table import BUCKET_SIZE, key_id, node_id
from swarm.node.run_node import RunNode
from swarm.run.records import record_validators
from swarm.wire.identity import Identity, PeerId, peer_id_bytes

CROWD = BUCKET_SIZE
"""Number of identities that can be all holders of a record."""


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


KIND = Kind(Sybil)
