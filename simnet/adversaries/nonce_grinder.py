from __future__ import annotations

import trio

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.jobs.inference import InferenceService
from swarm.messages import StepOrder
from swarm.rollouts.seeds import digest


class NonceGrinder(InferenceRole):
    """Draws its submissions with an entry that it ground after it knew the nonce, not with that
    of its admission. *Caught* by check `entry`. Grinding identities does not help either: a trusted
    peer's secret gives each its entry."""

    async def _make_submission(
        self, engine: InferenceService, order: StepOrder, nursery: trio.Nursery
    ) -> None:
        lease = self._peer.lease
        if lease is not None:
            lease.entry = digest("simnet/1/ground", order.nonce)[: len(lease.entry)]
        await super()._make_submission(engine, order, nursery)


KIND = Kind(NonceGrinder, "inference", caught_by="entry")
