from __future__ import annotations

from peers.inference.pending import PendingSubmission
from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.rollouts.seeds import digest
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import StepOrder


class NonceGrinder(InferenceRole):
    """Draws its submissions with an entry that it ground after it knew the nonce, not with that
    of its admission. *Caught* by check `entry`. Grinding identities does not help either: a trusted
    peer's secret gives each its entry."""

    def _begin_submission(self, order: StepOrder, manifest: RunManifest) -> PendingSubmission:
        lease = self._peer.lease
        if lease is not None:
            lease.entry = digest("simnet/1/ground", order.nonce)[: len(lease.entry)]
        return super()._begin_submission(order, manifest)


KIND = Kind(NonceGrinder, "inference", caught_by="entry")
