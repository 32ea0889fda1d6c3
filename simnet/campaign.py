"""Campaigns: many seeds of one scenario, and the fewest faults that still make one seed fail.

Seeds run in a pool of processes. If a process dies, its seed has failed.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import msgspec
from rich.console import Console

from simnet.faults import AnyFault, Lasting, Schedule, parse, to_toml
from simnet.simulate import simulate
from swarm.errors import leaf_errors
from swarm.terminal.figures import readable_seconds

LINE_SECONDS = 10.0
"""Time between two lines of progress."""
SHORTEST_SECONDS = 1.0
"""Shortest duration that a fault is shortened to."""

TRIES_MAX = 60
"""Most simulations spent on shrinking one schedule."""


@dataclass(frozen=True)
class Result:
    """The result of one seed."""

    seed: int
    violations: list[str]
    trace_hash: str
    schedule: str
    """The fault schedule, in TOML."""


@dataclass
class Campaign:
    """The results of all seeds."""

    scenario: str
    peers: int | None
    done: int = 0
    wall_seconds: float = 0.0
    virtual_seconds: float = 0.0
    failed: list[Result] = field(default_factory=list)
    interrupted: bool = False

    def replay(self, seed: int, *, faults: str = "") -> str:
        """The command that runs one seed again."""
        return replay_command(self.scenario, seed, peers=self.peers, faults=faults or None)


def replay_command(scenario: str, seed: int, **options: object) -> str:
    """The command that runs a scenario again; options that are None are left out."""
    command = [f"python -m simnet run {scenario} --seed {seed}"]
    for name, value in options.items():
        if value is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            command.append(f"--{name.replace('_', '-')} {shown}")
    return " ".join(command)


def run_seed(
    scenario: str, peers: int | None, seed: int, schedule: str | None = None
) -> tuple[Result, float]:
    """Run one seed; return its result and its virtual seconds. Any error counts as a violation."""
    faults = None if schedule is None else parse(schedule, "the schedule")
    try:
        report = simulate(scenario, peers=peers, seed=seed, faults=faults)
    except Exception as error:  # an error of a peer's task is reported like a violation
        last = traceback.extract_tb(leaf_errors(error)[0].__traceback__)[-1]
        what = f"{type(leaf_errors(error)[0]).__name__}: {leaf_errors(error)[0]}"
        return Result(seed, [f"{what} ({last.filename}:{last.lineno})"], "", schedule or ""), 0.0
    return (
        Result(seed, report["violations"], report["trace_hash"], report["faults"]),
        report["virtual_seconds"],
    )


def run_campaign(
    scenario: str,
    *,
    seeds: Sequence[int],
    peers: int | None = None,
    jobs: int = 1,
    console: Console | None = None,
) -> Campaign:
    """Run all seeds, `jobs` at a time, with a progress line; Ctrl-C returns the results so far."""
    console = console or Console(stderr=True)
    campaign = Campaign(scenario, peers)
    started = shown = time.monotonic()
    executor = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        running = {executor.submit(run_seed, scenario, peers, seed): seed for seed in seeds}
        for future in as_completed(running):
            seed = running[future]
            try:
                result, virtual = future.result()
            except BrokenProcessPool:
                result, virtual = Result(seed, ["its process died"], "", ""), 0.0
            campaign.done += 1
            campaign.virtual_seconds += virtual
            if result.violations:
                campaign.failed.append(result)
                console.print(f"seed {seed}: {result.violations[0]}", soft_wrap=True)
                console.print(f"  replay: {campaign.replay(seed)}", soft_wrap=True)
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


# --- making a schedule smaller ---


def minimise(
    schedule: Schedule, fails: Callable[[Schedule], bool], *, tries_max: int = TRIES_MAX
) -> Schedule:
    """Find a small schedule that still `fails`: first fewer faults (delta debugging, Zeller and
    Hildebrandt 2002), then faults with fewer peers or shorter ones."""
    tries = 0

    def still_fails(candidate: Schedule) -> bool:
        nonlocal tries
        tries += 1
        return tries <= tries_max and fails(candidate)

    if still_fails([]):
        return []
    parts = 2
    while len(schedule) > 1:
        for kept in _complements(schedule, parts):
            if still_fails(kept):
                schedule, parts = kept, max(2, parts - 1)
                break
        else:
            if parts >= len(schedule):
                break
            parts = min(len(schedule), 2 * parts)
    for index in range(len(schedule)):
        smaller = _smaller(schedule[index])
        while smaller:
            candidate = [*schedule[:index], smaller.pop(0), *schedule[index + 1 :]]
            if still_fails(candidate):
                schedule, smaller = candidate, _smaller(candidate[index])
    return schedule


def _complements(schedule: Schedule, parts: int) -> Iterator[Schedule]:
    """Yield, for each of `parts` parts of the schedule, the schedule without that part."""
    size = -(-len(schedule) // parts)
    for start in range(0, len(schedule), size):
        yield schedule[:start] + schedule[start + size :]


def _smaller(fault: AnyFault) -> Schedule:
    """Smaller variants of a fault: half as long, or without one of its peers."""
    found: Schedule = []
    if isinstance(fault, Lasting) and fault.seconds >= 2 * SHORTEST_SECONDS:
        found.append(msgspec.structs.replace(fault, seconds=round(fault.seconds / 2, 3)))
    if len(fault.peers) > 1:
        found.append(msgspec.structs.replace(fault, peers=fault.peers[:-1]))
    return found


def minimise_seed(campaign: Campaign, result: Result) -> str:
    """The smallest schedule found, in TOML, with which a failing seed still fails."""

    def fails(schedule: Schedule) -> bool:
        print(f"  with {len(schedule)} faults…", file=sys.stderr, flush=True)
        again, _ = run_seed(campaign.scenario, campaign.peers, result.seed, to_toml(schedule))
        return bool(again.violations)

    return to_toml(minimise(parse(result.schedule, f"seed {result.seed}"), fails))
