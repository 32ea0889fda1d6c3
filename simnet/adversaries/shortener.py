from __future__ import annotations

import msgspec

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.jobs import SubmissionOrder
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import StepOrder


class Shortener(InferenceRole):
    """Leaves the last group out of every submission, as if it had not liked it. *Caught* by check
    `groups`: every submission has the groups that the run asks for."""

    def _asked(self, order: StepOrder, manifest: RunManifest) -> SubmissionOrder:
        asked = super()._asked(order, manifest)
        return msgspec.structs.replace(asked, groups=asked.groups - 1)


KIND = Kind(Shortener, "inference", caught_by="groups")
