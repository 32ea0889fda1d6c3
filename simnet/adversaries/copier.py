from __future__ import annotations

from typing import ClassVar

import msgspec

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.gossip.topics import RUN, WORK
from swarm.jobs import SubmissionOrder
from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import nonce_of
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Acknowledgement, Presence, StepOrder


class Copier(InferenceRole):
    """Hands in another worker's files as its own, byte for byte, while that worker delivers them.
    The files follow from the seed, so any peer with the weights can make them. *Caught*: by
    `header`, which names the maker, and evicted; the other worker is credited."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._victim = peer.peer_id
        self._entries: dict[str, bytes] = {}
        """Entries of all workers, from the trusted peers' digests."""
        peer.gossip.listen(Acknowledgement, self._hear)
        peer.gossip.listen(Presence, self._hear_presence)

    def _hear(self, envelope: Envelope) -> None:
        worker = envelope.expect(Acknowledgement).worker
        if worker in self._entries:
            self._victim = PeerId(worker)

    def _hear_presence(self, envelope: Envelope) -> None:
        for each in envelope.expect(Presence).peers:
            if each.slot is not None and each.slot.entry:
                self._entries[each.peer] = each.slot.entry

    def _asked(self, order: StepOrder, manifest: RunManifest) -> SubmissionOrder:
        nonce = nonce_of(order.nonce, self._entries.get(self._victim, self._peer.entry))
        asked = super()._asked(order, manifest)
        return msgspec.structs.replace(asked, worker=self._victim, nonce=nonce)


KIND = Kind(Copier, "inference", caught_by="header")
