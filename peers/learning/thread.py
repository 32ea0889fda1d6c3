"""The thread of a service that computes with a policy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from peers.learning.ranks import Ranks
from swarm.world.tasks import J, JobThread, R


class LearnerThread(JobThread):
    """Collectives must come in the same order on every rank, on its own device."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._device = ranks.device

    async def run(self, work: Callable[[J], R], job: J) -> R:
        def on_device(job: J) -> R:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own
            return work(job)

        return await super().run(on_device, job)
