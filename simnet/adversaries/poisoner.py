from __future__ import annotations

import dataclasses

from simnet.adversaries.base import Adversary, Kind, answer_dht
from swarm.kademlia import wire
from swarm.node.run_node import RunNode


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


KIND = Kind(Poisoner)
