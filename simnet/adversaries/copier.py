from __future__ import annotations

from typing import ClassVar

import msgspec
import trio

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.envelope import Envelope
from swarm.gossip.topics import RUN, WORK
from swarm.identity import PeerId
from swarm.jobs.inference import Generate, Generated, InferenceService
from swarm.messages import Acknowledgement, Presence, StepOrder
from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import nonce_of


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

    async def _make_submission(
        self, engine: InferenceService, order: StepOrder, nursery: trio.Nursery
    ) -> None:
        nonce = nonce_of(order.nonce, self._entries.get(self._victim, self._peer.entry))
        await super()._make_submission(_EngineOf(engine, self._victim, nonce), order, nursery)


class _EngineOf:
    """An engine that generates another worker's files instead of the peer's own."""

    def __init__(self, engine: InferenceService, worker: PeerId, nonce: bytes) -> None:
        self._engine = engine
        self._worker = worker
        self._nonce = nonce
        self.load, self.probe, self.survey = engine.load, engine.probe, engine.survey
        self.usage = engine.usage

    async def generate(self, job: Generate) -> Generated:
        order = msgspec.structs.replace(job.order, worker=self._worker, nonce=self._nonce)
        return await self._engine.generate(msgspec.structs.replace(job, order=order))


KIND = Kind(Copier, "inference", caught_by="header")
