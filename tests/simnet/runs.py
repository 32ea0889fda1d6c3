"""Small runs of production peers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from simnet.compute.setting import Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation

SMALL = Workload(model_bytes=500_000, completion_tokens_mean=64)


@asynccontextmanager
async def going(simulation: Simulation, *plans: Plan, **run: Any) -> AsyncIterator[dict[str, Peer]]:
    """The peers of a run, by name, started one after another in this order.

    Its manifest names those that are trusted by their roles; `run` are further fields of it. It
    ends with the block, and must have violated no invariant.
    """

    def named(role: str) -> list[str]:
        return [plan.name for plan in plans if role in plan.roles]

    async with simulation.running():
        given: dict[str, Any] = {
            "trainers": named("trainer"),
            "validators": named("validator"),
            "environment_peers": named("environment"),
            "groups_per_step": 8,
            "max_new_tokens": 256,
        }
        await start_bootstrap(simulation, **{**given, **run})
        for plan in plans:
            await simulation.add(plan).start()
        yield simulation.peers
    assert not simulation.violations, simulation.violations
