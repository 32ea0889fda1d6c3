"""Simulated runs with production roles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event

RUN = partial(run_virtual, seed=5, limit_seconds=7200.0)
"""How tests with `simulated` are run: their modules' `RUNNER`."""


class Said(list[Event]):
    """What all peers have said."""

    def named(self, name: str) -> list[dict[str, Any]]:
        """The fields of the events with this name."""
        return [dict(event.fields) for event in self if event.name == name]

    def names(self) -> list[str]:
        return [event.name for event in self]


@asynccontextmanager
async def simulated(seed: int = 5, **workload: Any) -> AsyncIterator[tuple[Simulation, Said]]:
    """A simulation that ends with the block, and what was said; no invariant may be violated."""
    given = {"model_bytes": 3_000_000, "completion_tokens_mean": 64, **workload}
    simulation = Simulation(seed, workload=Workload(**given))
    said = Said()
    simulation.listeners.append(lambda _, __, event: said.append(event))
    async with simulation.running():
        yield simulation, said
    assert not simulation.violations, simulation.violations


async def start_run(
    simulation: Simulation,
    *names: str,
    mirrors: Sequence[str] = (),
    steps: int = 3,
    step_seconds: float = 60.0,
    save_steps: int | None = 1,
    validators: Sequence[str] = ("validator",),
    prefill_tokens_per_second: float = 40_000.0,
    trainer_memory_bytes: int = 1 << 50,
    memory_check: str = "refuse",
    trainer: dict[str, Any] | None = None,
    validator: dict[str, Any] | None = None,
    broken: Sequence[str] = (),
    groups_per_step: int = 8,
    **run: Any,
) -> dict[str, Peer]:
    """Start a run and these peers, whose names begin with their roles; `broken` ones cannot
    grade."""
    await start_bootstrap(
        simulation, trainers=["trainer"], validators=validators, steps=steps,
        groups_per_step=groups_per_step, max_new_tokens=256, **run,
    )  # fmt: skip
    peers = {}
    for name in names:
        tables: dict[str, dict[str, Any]] = {"validator": validator or {}}
        if name == "trainer":
            tables["trainer"] = {
                "model": "simulated",
                "starved_seconds": 60.0,
                "mirrors": list(mirrors),
                **({} if save_steps is None else {"save_steps": save_steps}),
                "memory_check": memory_check,
                **(trainer or {}),
            }
        plan = Plan(
            name,
            [name.partition("-")[0]],
            tables=tables,
            hardware=Hardware(
                step_seconds=step_seconds,
                prefill_tokens_per_second=prefill_tokens_per_second,
                memory_bytes=trainer_memory_bytes if name == "trainer" else 1 << 50,
                grades=name not in broken,
            ),
        )
        peers[name] = simulation.add(plan)
        await peers[name].start()
    return peers


async def finish(simulation: Simulation) -> None:
    """Wait until the run is over."""
    over = simulation.expect("trainer.run_complete", ["trainer"])
    assert await simulation.meet(over, 1800), simulation.peers["trainer"].ended


async def restart(peer: Peer) -> None:
    await peer.kill()
    await peer.start(resume=True)
