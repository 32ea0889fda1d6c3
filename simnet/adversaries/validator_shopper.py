from __future__ import annotations

from peers.inference.delivery import Deliveries, Parcel
from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.errors import PeerError
from swarm.jobs import SubmissionOrder
from swarm.node.run_node import RunNode
from swarm.wire.identity import PeerId


def fabricates(order: SubmissionOrder) -> str:
    """Other weights, in half of the submissions."""
    return "weights" if order.seed()[0] % 2 else ""


class ValidatorShopper(InferenceRole):
    """Shows every submission to all validators at once, in the hope that one of them does not
    recompute it. *Caught* by `proofs`: a refusal that was recomputed beats any acceptance."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._deliveries = _ToAll(peer)


class _ToAll(Deliveries):
    async def deliver(self, validator: PeerId, parcel: Parcel) -> bool:
        for other in reversed(self._run.manifest.validator_ids()):
            if other != validator:
                try:
                    await super().deliver(PeerId(other), parcel)
                except PeerError:
                    continue
        return await super().deliver(validator, parcel)


KIND = Kind(ValidatorShopper, "inference", fabricates=fabricates, caught_by="proofs")
