"""A simulated month in small: does the disk or the memory of any role grow?

    python -m benchmarks.operation month

Production peers in virtual time (`simnet`): a bootstrap peer, a relay, a trainer, three validators
and twelve workers. A simulated second costs as much in which nothing happens, so this is not a
month of the clock: it has twelve days of 400 s, with about 32 steps, 220 submissions and 5 restarts
each, by a power cut or a killed process in turn. Each day a worker leaves for good, and a new one
comes. What expires by the clock is held for a longer share of such a day, so it shows more, not
less. An epoch of the ledger is sealed about every second day.

At the end of each day the files, databases, rows and collections of each peer are counted. A
quantity is flat if the slope of its line of least squares over the last two thirds of the days is
below two standard errors or below 1 % a week.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.invariants import Invariants, collections_in
from simnet.lines import Line
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.manifest import Limits, Thresholds

DAYS = 12
DAY_SECONDS = 400.0
STEP_SECONDS = 12.0
GROUPS_PER_STEP = 24
"""Six submissions of each step are trained on."""
VALIDATORS, WORKERS = 3, 12
EPOCH_ENTRIES = 800
"""New entries of all logs after which they are sealed; a step makes about 16."""
STAKE_STEPS = 20
"""A step's credit is final 30 steps later."""
RESTARTS_PER_DAY = 5
"""Of 18 peers."""
DOWN_SECONDS = 20.0
FLAT_SHARE_PER_WEEK = 0.01
SEED = 1
WORKLOAD = Workload(model_bytes=500_000, completion_tokens_mean=64.0)


@dataclass(frozen=True)
class Size:
    """How long and how busy the month is."""

    days: int = DAYS
    day_seconds: float = DAY_SECONDS
    workers: int = WORKERS
    restarts_per_day: int = RESTARTS_PER_DAY


class Slope(msgspec.Struct, frozen=True):
    """The change of one quantity of one role over the last two thirds of the days."""

    role: str
    quantity: str
    mean: float
    percent_a_week: float
    percent_a_week_error: float
    """Standard error of the slope."""
    last: float
    flat: bool


class Month(msgspec.Struct, frozen=True):
    """What a simulated month showed."""

    days: int
    virtual_seconds: float
    cpu_seconds: float
    steps: int
    submissions: int
    restarts: int
    seals: int
    """Of all trusted peers together."""
    violations: list[str]
    slopes: list[Slope]
    """Bytes on disk, rows and entries in memory of each role."""
    growing: list[Slope]
    """Tables and collections that are not flat, steepest first."""


Sample = dict[tuple[str, str], float]
"""Value of each (role, quantity) on one day: the mean over the role's peers."""


def measure(size: Size | None = None) -> Month:
    """Simulate a month; takes about three minutes of one core."""
    size = size or Size()
    simulation = Simulation(SEED, workload=WORKLOAD)
    invariants = Invariants(simulation)
    samples: list[Sample] = []
    began = time.process_time()
    restarts = 0

    async def main() -> None:
        nonlocal restarts
        async with simulation.running():
            simulation.nursery.start_soon(invariants.watch)
            await _begin(simulation, size)
            for day in range(size.days):
                restarts += await _live_a_day(simulation, size, day)
                samples.append(_sample(simulation))

    with invariants.hearing_errors():
        run_virtual(main, seed=SEED)
    counts = simulation.trace.counts
    found = _slopes(samples)
    totals = ("disk bytes", "rows", "entries in memory")
    return Month(
        days=len(samples),
        virtual_seconds=size.days * size.day_seconds,
        cpu_seconds=round(time.process_time() - began, 1),
        steps=counts["trainer.step_trained"],
        submissions=counts["validator.verdict"],
        restarts=restarts,
        seals=counts["ledger.sealed"],
        violations=simulation.violations,
        slopes=[each for each in found if each.quantity in totals],
        growing=sorted(
            (each for each in found if not each.flat and each.quantity not in totals),
            key=lambda each: -each.percent_a_week,
        ),
    )


async def _begin(simulation: Simulation, size: Size) -> None:
    validators = [f"validator-{number}" for number in range(VALIDATORS)]
    await start_bootstrap(
        simulation, trainers=["trainer"], validators=validators, steps=1_000_000,
        groups_per_step=GROUPS_PER_STEP, max_new_tokens=256,
        limits=Limits(epoch_entries=EPOCH_ENTRIES),
        thresholds=Thresholds(stake_steps=STAKE_STEPS),
    )  # fmt: skip
    machine = Hardware(tokens_per_second=1500.0, step_seconds=STEP_SECONDS)
    for name in validators:
        await simulation.add(Plan(name, ["validator"], SERVER, machine)).start()
    await simulation.add(Plan("trainer", ["trainer"], SERVER, machine)).start()
    await simulation.add(Plan("relay", ["relay"], SERVER)).start()
    for number in range(size.workers):
        await simulation.add(_worker(f"worker-{number}", machine)).start()


def _worker(name: str, machine: Hardware) -> Plan:
    return Plan(name, ["inference"], Line(), machine)


async def _live_a_day(simulation: Simulation, size: Size, day: int) -> int:
    """Restart some peers in turn, and replace one worker; return the number of restarts."""
    pause = size.day_seconds / (size.restarts_per_day + 1)
    for number in range(size.restarts_per_day):
        await trio.sleep(pause - DOWN_SECONDS)
        here = [peer for peer in simulation.peers.values() if peer.alive]
        peer = here[(day * size.restarts_per_day + number) % len(here)]
        await (peer.crash() if number % 2 else peer.kill())
        await trio.sleep(DOWN_SECONDS)
        workers = [each for each in here if each.plan.roles == ["inference"]]
        if number == 0 and day:
            await _replace(simulation, workers[day % len(workers)])
        await peer.start_again()
    await trio.sleep(pause)
    return size.restarts_per_day


async def _replace(simulation: Simulation, worker: Peer) -> None:
    """Let a worker leave for good, and a new one come."""
    if worker.alive:
        await worker.kill()
    worker.left = True
    await simulation.add(worker.successor()).start()


# --- counting --------------------------------------------------------------------------------


def _sample(simulation: Simulation) -> Sample:
    """Count what each running peer holds, and take the mean by role."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for peer in simulation.peers.values():
        if peer.node is None:
            continue
        held: defaultdict[str, float] = defaultdict(float)
        held["disk bytes"] = peer.disk.used_bytes
        for path in peer.disk.databases():
            for quantity, value in _database(peer, path):
                held[quantity] += value
        for where, entries in collections_in(peer.node, peer.part, *peer.roles):
            held[f"memory {where}"] += entries
            held["entries in memory"] += entries
        for quantity, value in held.items():
            found[peer.plan.roles[0], quantity].append(value)
    return {key: statistics.fmean(values) for key, values in sorted(found.items())}


def _database(peer: Peer, path: str) -> Iterator[tuple[str, float]]:
    """Bytes in use, and rows by table, of one database."""
    database = peer.disk.database(path)
    ((pages,),) = database.read("PRAGMA page_count")
    ((free,),) = database.read("PRAGMA freelist_count")
    ((size,),) = database.read("PRAGMA page_size")
    yield "disk bytes", (pages - free) * size
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
    for (table,) in database.read(tables):
        ((rows,),) = database.read(f"SELECT COUNT(*) FROM {table}")
        yield f"table {path}:{table}", rows
        yield "rows", rows


def _slopes(samples: list[Sample]) -> list[Slope]:
    """The slope of each quantity over the last two thirds of the days."""
    late = samples[len(samples) // 3 :]
    return [_slope(*key, [each.get(key, 0.0) for each in late]) for key in sorted(late[-1])]


def _slope(role: str, quantity: str, values: list[float]) -> Slope:
    days = range(len(values))
    mean = statistics.fmean(values)
    slope, start = statistics.linear_regression(days, values)
    residuals = [value - (start + slope * day) for day, value in zip(days, values, strict=True)]
    variance = sum(each**2 for each in residuals) / max(1, len(values) - 2)
    spread = sum((day - statistics.fmean(days)) ** 2 for day in days)
    error = (variance / spread) ** 0.5
    flat = abs(slope) <= 2 * error or abs(slope) * 7 <= FLAT_SHARE_PER_WEEK * mean
    share = 700 / mean if mean else 0.0
    return Slope(
        role=role,
        quantity=quantity,
        mean=round(mean, 1),
        percent_a_week=round(slope * share, 2),
        percent_a_week_error=round(error * share, 2),
        last=round(values[-1], 1),
        flat=flat,
    )
