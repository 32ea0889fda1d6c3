from __future__ import annotations

from peers.inference.pending import PendingSubmission
from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import StepOrder


class Staller(InferenceRole):
    """Leaves out every even number, so that the odd ones wait for what never comes. *Harmless*:
    only the next number is acknowledged, and a trainer counts on nothing else."""

    def _begin_submission(self, order: StepOrder, manifest: RunManifest) -> PendingSubmission:
        self._pending.number |= 1
        return super()._begin_submission(order, manifest)


KIND = Kind(Staller, "inference")
