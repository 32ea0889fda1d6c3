"""One simulation of a scenario, from its seed to its report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from simnet import scenarios
from simnet.clock import run_virtual
from simnet.faults import Schedule
from simnet.invariants import Invariants
from simnet.observations import Observations
from simnet.report import Progress, readable_event
from simnet.scenarios import Scenario
from simnet.simulation import Simulation
from swarm.errors import UserError, user_error_in
from swarm.terminal.extras import require_extra

VIRTUAL_SECONDS_MAX = 7 * 24 * 3600.0


def simulate(
    name: str | Scenario,
    *,
    peers: int | None = None,
    seed: int = 1,
    model_bytes: int | None = None,
    faults: Schedule | None = None,
    shows_progress: bool = False,
    plot_path: Path | None = None,
) -> dict[str, Any]:
    """Run a scenario to its end; return the report for `--json`.

    `name` may be a scenario that has no file. Raises `UserError`, or `Deadlock`.
    """
    if plot_path is not None:
        require_extra("plots", "the plot")
    scenario = _scenario(name, peers, model_bytes)
    simulation = Simulation(seed, workload=scenario.workload)
    simulation.faults = faults
    observations = Observations(simulation)
    invariants = Invariants(simulation)
    figures: dict[str, Any] = {}
    virtual_seconds = 0.0

    async def main() -> None:
        nonlocal virtual_seconds
        if shows_progress:
            trio.lowlevel.add_instrument(Progress(simulation))
        async with simulation.running():
            try:
                simulation.nursery.start_soon(invariants.watch)
                figures.update(await scenario.run(simulation, scenario.peers))
                await invariants.settle()
            finally:
                virtual_seconds = simulation.now()

    started = time.perf_counter()
    with invariants.hearing_errors():
        _run(main, seed)
    report = {
        "scenario": scenario.name,
        "peers": scenario.peers,
        "seed": seed,
        "virtual_seconds": round(virtual_seconds, 6),
        "wall_seconds": round(time.perf_counter() - started, 3),
        "events": simulation.trace.events,
        "trace_hash": simulation.trace.digest(),
        "violations": simulation.violations,
        "led_there": [readable_event(entry) for entry in simulation.led_there],
        "figures": figures,
        "faults": msgspec.to_builtins(simulation.faults or []),
        "network": observations.summary(),
    }
    if plot_path is not None:
        from simnet.plot import draw  # matplotlib takes a second to import

        draw(observations, report, plot_path)
    return report


def _run(main: Callable[[], Awaitable[None]], seed: int) -> None:
    try:
        run_virtual(main, seed=seed, limit_seconds=VIRTUAL_SECONDS_MAX)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from None
        mistake = user_error_in(group)  # a schedule may not fit the scenario
        if mistake is None:
            raise
        raise mistake from None


def _scenario(name: str | Scenario, peers: int | None, model_bytes: int | None) -> Scenario:
    """Load a scenario, with another number of peers or size of the model if they are given."""
    scenario = scenarios.load(name) if isinstance(name, str) else name
    if peers is not None:
        if peers < scenario.peers_min:
            raise UserError(
                f"{scenario.name} needs at least {scenario.peers_min} peers, not {peers}"
            )
        scenario = dataclasses.replace(scenario, peers=peers)
    if model_bytes is not None:
        workload = dataclasses.replace(scenario.workload, model_bytes=model_bytes)
        scenario = dataclasses.replace(scenario, workload=workload)
    return scenario
