"""Campaigns: many seeds of one scenario.

Seeds run in a pool of processes. If a process dies, its seed has failed.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from rich.console import Console

from simnet.simulate import simulate
from swarm.errors import leaf_errors
from swarm.terminal.figures import readable_seconds

LINE_SECONDS = 10.0
"""Time between two lines of progress."""


@dataclass(frozen=True)
class Result:
    """The result of one seed."""

    seed: int
    violations: list[str]
    trace_hash: str
    virtual_seconds: float = 0.0


@dataclass
class Campaign:
    """The results of all seeds."""

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
