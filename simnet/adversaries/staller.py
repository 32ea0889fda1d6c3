from __future__ import annotations

import trio

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.jobs.inference import InferenceService
from swarm.messages import StepOrder


class Staller(InferenceRole):
    """Leaves out every even number, so that the odd ones wait for what never comes. *Harmless*:
    only the next number is acknowledged, and a trainer counts on nothing else."""

    async def _make_submission(
        self, engine: InferenceService, order: StepOrder, nursery: trio.Nursery
    ) -> None:
        self._number |= 1
        await super()._make_submission(engine, order, nursery)


KIND = Kind(Staller, "inference")
