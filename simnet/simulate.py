"""One simulation of a scenario, from its seed to its report."""

import dataclasses
import multiprocessing
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio
from rich.console import Console

from simnet import scenarios
from simnet.clock import run_virtual
from simnet.faults import Schedule
from simnet.invariants import Invariants
from simnet.observations import Observations
from simnet.report import Progress, readable_event
from simnet.scenarios import Scenario
from simnet.simulation import Simulation
from swarm.errors import UserError, leaf_errors, user_error_in
from swarm.terminal.extras import require_extra
from swarm.terminal.figures import readable_seconds

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
    """Run a scenario to its end; return the report for `--json`. `name` may be one without a file.
    Raises `UserError`, or `Deadlock`."""
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


LINE_SECONDS = 10.0


@dataclass(frozen=True)
class Result:
    seed: int
    violations: list[str]
    trace_hash: str
    virtual_seconds: float = 0.0


@dataclass
class Campaign:
    done: int = 0
    wall_seconds: float = 0.0
    virtual_seconds: float = 0.0
    failed: list[Result] = field(default_factory=list)
    interrupted: bool = False


def replay_command(scenario: str, seed: int, **options: object) -> str:
    """The command that runs a scenario again; options that are None are left out."""
    command = [f"python -m simnet run {scenario} --seed {seed}"]
    for name, value in options.items():
        if value is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            command.append(f"--{name.replace('_', '-')} {shown}")
    return " ".join(command)


def run_seed(scenario: str, peers: int | None, seed: int) -> Result:
    """Run one seed. Any error counts as a violation."""
    try:
        report = simulate(scenario, peers=peers, seed=seed)
    except Exception as error:  # an error of a peer's task is reported like a violation
        last = traceback.extract_tb(leaf_errors(error)[0].__traceback__)[-1]
        what = f"{type(leaf_errors(error)[0]).__name__}: {leaf_errors(error)[0]}"
        return Result(seed, [f"{what} ({last.filename}:{last.lineno})"], "")
    return Result(seed, report["violations"], report["trace_hash"], report["virtual_seconds"])


def run_campaign(
    scenario: str, *, seeds: Sequence[int], peers: int | None = None, jobs: int = 1
) -> Campaign:
    """Run all seeds, `jobs` at a time, with a progress line; Ctrl-C returns the results so far."""
    console = Console(stderr=True)
    campaign = Campaign()
    started = shown = time.monotonic()
    executor = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        running = {executor.submit(run_seed, scenario, peers, seed): seed for seed in seeds}
        for future in as_completed(running):
            seed = running[future]
            try:
                result = future.result()
            except BrokenProcessPool:
                result = Result(seed, ["its process died"], "")
            campaign.done += 1
            campaign.virtual_seconds += result.virtual_seconds
            if result.violations:
                campaign.failed.append(result)
                console.print(f"seed {seed}: {result.violations[0]}", soft_wrap=True)
                replay = replay_command(scenario, seed, peers=peers)
                console.print(f"  replay: {replay}", soft_wrap=True)
            now = time.monotonic()
            if now - shown >= LINE_SECONDS or campaign.done == len(seeds):
                shown = now
                rate = campaign.done / (now - started)
                console.print(
                    f"{campaign.done:,} of {len(seeds):,} seeds, {len(campaign.failed)} failed, "
                    f"{rate:.2f} seeds/s, "
                    f"{readable_seconds((len(seeds) - campaign.done) / rate)} left"
                )
    except KeyboardInterrupt:
        campaign.interrupted = True
    finally:
        executor.shutdown(wait=not campaign.interrupted, cancel_futures=True)
    campaign.failed.sort(key=lambda result: result.seed)
    campaign.wall_seconds = time.monotonic() - started
    return campaign
