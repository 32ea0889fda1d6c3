from __future__ import annotations

import msgspec
import trio

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.jobs.inference import Generate, Generated, InferenceService
from swarm.messages import StepOrder


class Shortener(InferenceRole):
    """Leaves the last group out of every submission, as if it had not liked it. *Caught* by check
    `groups`: every submission has the groups that the run asks for."""

    async def _make_submission(
        self, engine: InferenceService, order: StepOrder, nursery: trio.Nursery
    ) -> None:
        await super()._make_submission(_Shorter(engine), order, nursery)


class _Shorter:
    """An engine that generates a group less."""

    def __init__(self, engine: InferenceService) -> None:
        self._engine = engine
        self.load, self.probe, self.survey = engine.load, engine.probe, engine.survey
        self.usage = engine.usage

    async def generate(self, job: Generate) -> Generated:
        order = msgspec.structs.replace(job.order, groups=job.order.groups - 1)
        return await self._engine.generate(msgspec.structs.replace(job, order=order))


KIND = Kind(Shortener, "inference", caught_by="groups")
