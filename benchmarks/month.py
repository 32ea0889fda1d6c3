"""A simulated month in small: does the disk or the memory of any role grow?

    python -m benchmarks.month
    python -m benchmarks.month --days 6

Prints one JSON object. Production peers in virtual time (`simnet`): a bootstrap peer, a relay, an
observer, a trainer and its standby, three validators and eight workers. A simulated second costs as
much in which nothing happens, so a day has an hour: about 33 steps, 110 submissions and 3 restarts,
by a power cut or a killed process in turn. Each day a worker leaves for good, and a new one comes.
An epoch of the ledger is sealed about once a day. Fifteen days pass before the month that counts:
by then what is kept for hours has expired, and the last 512 steps, which a trainer remembers, are
over.

Twelve times a day the files, databases, rows and collections of each peer are counted. They rise
between two seals and fall when sealed entries are deleted, so they are averaged over each epoch.
The slope is that of the line of least squares through the epochs of the last two thirds of the
days, which are thirty; its error allows for residuals that follow each other. A quantity is flat if
its slope is below 1 % a week by two errors, and grows if it is above 1 % and above two errors.

A restart empties what a process holds, and so hides its growth. Therefore a third of the validators
and half of the workers are never restarted, the other peers of which there is one only in the first
third of the days. Only these count for memory; all of them count for the disk.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import msgspec
import trio

from benchmarks.common import at_least, load_average
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.invariants import Invariants
from simnet.lines import Line
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.terminal.output import print_json
from swarm.wire.manifest import Limits, Thresholds

DOWN_SECONDS = 10.0
SAMPLES_PER_DAY = 12
FLAT_PERCENT_A_WEEK = 1.0
EPOCHS_MIN = 4
"""Fewer epochs have no slope."""
SEED = 1
WORKLOAD = Workload(model_bytes=500_000, completion_tokens_mean=64.0)
FEW_PROOFS = {"inference": {"proofs_kept_bytes": 100_000}}
"""Workers' room for proofs of their own work, so small that a month fills it."""
TOTALS = ("disk bytes", "rows", "entries in memory")


@dataclass(frozen=True)
class Size:
    """How long and how busy the month is."""

    days: int = 45
    day_seconds: float = 3600.0
    validators: int = 3
    workers: int = 8
    restarts_per_day: int = 3
    leavers_per_day: int = 1
    """Workers that are replaced by others: none or one."""
    step_seconds: float = 108.0
    groups_per_step: int = 12
    """Four of a submission."""
    stake_steps: int = 10
    """A step's credit is final ten steps later still."""
    epoch_entries: int = 250
    """New entries of all logs after which they are sealed; a step makes about 16."""


class Slope(msgspec.Struct, frozen=True):
    """The change of one quantity of one role over the last two thirds of the days."""

    role: str
    quantity: str
    mean: float
    a_day: float
    percent_a_week: float
    percent_a_week_error: float
    """Standard error."""
    trend: Literal["flat", "grows", "shrinks", "unsure"]


class Month(msgspec.Struct, frozen=True):
    """What a simulated month showed."""

    days: float
    virtual_seconds: float
    cpu_seconds: float
    steps: int
    submissions: int
    restarts: int
    epochs: int
    violations: list[str]
    slopes: list[Slope]
    """Bytes on disk, rows and entries in memory of each role."""
    growing: list[Slope]
    """Tables and collections that grow, steepest first."""


Sample = dict[tuple[str, str], float]
"""Value of each (role, quantity) at one time: the mean over the role's peers."""


@dataclass
class Diary:
    """What was counted so far."""

    size: Size
    restarts: int = 0
    seals: list[float] = field(default_factory=list)
    """Days at which an epoch's first seal was written."""
    samples: list[tuple[float, Sample]] = field(default_factory=list)
    """(day, sample), in order."""


def measure(size: Size | None = None, each_day: Callable[[Month], None] | None = None) -> Month:
    """Simulate a month; takes about twenty minutes of one core. `each_day` gets what is known."""
    size, each_day = size or Size(), each_day or _say
    simulation, diary = Simulation(SEED, workload=WORKLOAD), Diary(size)
    invariants = Invariants(simulation)
    began = time.process_time()

    def hear(now: float, _: Peer, event: Event) -> None:
        if event.name == "ledger.sealed" and event.fields["epoch"] == len(diary.seals):
            diary.seals.append(now / size.day_seconds)

    async def main() -> None:
        simulation.listeners.append(hear)
        async with simulation.running():
            simulation.nursery.start_soon(invariants.watch)
            await _begin(simulation, size)
            simulation.nursery.start_soon(_count, simulation, diary)
            for day in range(size.days):
                await _live_a_day(simulation, diary, day)
                each_day(_summary(simulation, diary, time.process_time() - began))

    with invariants.hearing_errors():
        run_virtual(main, seed=SEED)
    return _summary(simulation, diary, time.process_time() - began)


def _say(month: Month) -> None:
    print(
        f"day {month.days:.0f}: {month.steps} steps, {month.cpu_seconds:.0f} s of CPU time",
        file=sys.stderr,
    )


def _summary(simulation: Simulation, diary: Diary, cpu_seconds: float) -> Month:
    counts, found = simulation.trace.counts, slopes(diary)
    seconds = diary.samples[-1][0] * diary.size.day_seconds
    return Month(
        days=round(diary.samples[-1][0], 1),
        virtual_seconds=round(seconds, 1),
        cpu_seconds=round(cpu_seconds, 1),
        steps=counts["trainer.step_trained"],
        submissions=counts["validator.verdict"],
        restarts=diary.restarts,
        epochs=len(diary.seals),
        violations=simulation.violations,
        slopes=[each for each in found if each.quantity in TOTALS],
        growing=sorted(
            (each for each in found if each.trend == "grows" and each.quantity not in TOTALS),
            key=lambda each: -each.percent_a_week,
        ),
    )


# --- the month -------------------------------------------------------------------------------


async def _begin(simulation: Simulation, size: Size) -> None:
    validators = [f"validator-{number}" for number in range(size.validators)]
    await start_bootstrap(
        simulation, trainers=["trainer"], standbys=["standby"], validators=validators,
        steps=1_000_000,
        groups_per_step=size.groups_per_step, max_new_tokens=256,
        limits=Limits(epoch_entries=size.epoch_entries),
        thresholds=Thresholds(stake_steps=size.stake_steps, measured_tokens=1),
    )  # fmt: skip
    machine = Hardware(tokens_per_second=1500.0, step_seconds=size.step_seconds)
    for name in validators:
        await simulation.add(Plan(name, ["validator"], SERVER, machine)).start()
    for name in ("trainer", "standby"):
        await simulation.add(Plan(name, ["trainer"], SERVER, machine)).start()
    for name in ("relay", "observer"):
        await simulation.add(Plan(name, [name], SERVER)).start()
    for number in range(size.workers):
        plan = Plan(f"worker-{number}", ["inference"], Line(), machine, tables=FEW_PROOFS)
        await simulation.add(plan).start()


def _steady(name: str) -> bool:
    """Whether a peer is not restarted after the first third of the days, nor replaced."""
    kind, _, number = name.partition("-")
    if kind == "validator":
        return number == "0"
    return kind != "worker" or ("~" not in number and int(number) % 2 == 0)


async def _live_a_day(simulation: Simulation, diary: Diary, day: int) -> None:
    """Restart some peers in turn, and replace one worker."""
    size, early = diary.size, day < diary.size.days // 3
    pause = size.day_seconds / (size.restarts_per_day + 1)
    for number in range(size.restarts_per_day):
        await trio.sleep(pause - DOWN_SECONDS)
        shaken = [
            peer
            for peer in simulation.peers.values()
            if peer.alive and not (_steady(peer.name) and (_lasting(peer.name) or not early))
        ]
        peer = shaken[(day * size.restarts_per_day + number) % len(shaken)]
        await (peer.crash() if number % 2 else peer.kill())
        diary.restarts += 1
        await trio.sleep(DOWN_SECONDS)
        if number < size.leavers_per_day and day:
            workers = [each for each in shaken if each.plan.roles == ["inference"]]
            await _replace(simulation, workers[day % len(workers)])
        await peer.start_again()
    await trio.sleep(pause)


def _lasting(name: str) -> bool:
    """Whether a steady peer is not restarted in the first third of the days either."""
    return "-" in name


async def _replace(simulation: Simulation, worker: Peer) -> None:
    """Let a worker leave for good, and a new one come."""
    if worker.alive:
        await worker.kill()
    worker.left = True
    await simulation.add(worker.successor()).start()


# --- counting --------------------------------------------------------------------------------


async def _count(simulation: Simulation, diary: Diary) -> None:
    """Take samples for ever."""
    while True:
        diary.samples.append((trio.current_time() / diary.size.day_seconds, _sample(simulation)))
        await trio.sleep(diary.size.day_seconds / SAMPLES_PER_DAY)


def _sample(simulation: Simulation) -> Sample:
    """Count what each running peer holds, and take the mean by role."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for peer in simulation.peers.values():
        if peer.node is None:
            continue
        held: defaultdict[str, float] = defaultdict(float)
        for quantity, value in stored(peer):
            held[quantity] += value
        if _steady(peer.name):
            for where, entries in collections(peer.node, peer.part, *peer.roles):
                held[f"memory {where}"] += entries
                held["entries in memory"] += entries
        for quantity, value in held.items():
            found[_role(peer), quantity].append(value)
    return {key: statistics.fmean(values) for key, values in sorted(found.items())}


def _role(peer: Peer) -> str:
    return peer.name if peer.name == "standby" else peer.plan.roles[0]


def stored(peer: Peer) -> Iterator[tuple[str, float]]:
    """Bytes of a peer's files and databases, files by folder, and rows by table."""
    yield "disk bytes", peer.disk.used_bytes
    for path in peer.disk.files():
        yield f"files {path.split('/')[0]}", 1
    for path in peer.disk.databases():
        database = peer.disk.database(path)
        ((pages,),) = database.read("PRAGMA page_count")
        ((free,),) = database.read("PRAGMA freelist_count")
        ((page_bytes,),) = database.read("PRAGMA page_size")
        yield "disk bytes", (pages - free) * page_bytes
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        for (table,) in database.read(tables):
            ((rows,),) = database.read(f"SELECT COUNT(*) FROM {table}")
            yield f"table {path}:{table}", rows
            yield "rows", rows


def collections(*roots: object) -> Iterator[tuple[str, int]]:
    """Yield (class and attribute, entries) of the collections that are reachable from `roots`.

    Unlike `simnet.invariants.collections_in` it also looks into collections, of which the first
    entry shows whether they hold others.
    """
    seen: dict[int, object] = {}
    todo: list[tuple[str, object]] = []
    for root in roots:  # a role may be of a class of the simulation
        todo += [(f"{type(root).__name__}.{name}", value) for name, value in _fields(root)]
    while todo:
        where, held = todo.pop()
        if id(held) in seen:
            continue
        seen[id(held)] = held
        if isinstance(held, (dict, list, set, deque)):
            yield where, len(held)
            values = held.values() if isinstance(held, dict) else held
            if _holds(next(iter(values), None)):
                todo += [(f"{where}[]", value) for value in values]
        elif _holds(held):
            kind = type(held).__name__
            todo += [(f"{kind}.{name}", value) for name, value in _fields(held)]


def _fields(held: object) -> list[tuple[str, object]]:
    return list(getattr(held, "__dict__", {}).items())


def _holds(value: object) -> bool:
    """Whether a value may hold collections."""
    if isinstance(value, (dict, list, set, deque)):
        return True
    return type(value).__module__.startswith(("swarm.", "peers.")) and hasattr(value, "__dict__")


# --- slopes ----------------------------------------------------------------------------------


def slopes(diary: Diary) -> list[Slope]:
    """The slope of each quantity over the epochs of the last two thirds of the days so far."""
    late = diary.samples[-1][0] / 3
    epochs = [
        found
        for begin, end in pairwise(diary.seals)
        if begin >= late and (found := [each for each in diary.samples if begin <= each[0] < end])
    ]
    if len(epochs) < EPOCHS_MIN:
        return []
    days = [statistics.fmean(day for day, _ in epoch) for epoch in epochs]
    return [
        _slope(*key, days, [[sample.get(key, 0.0) for _, sample in epoch] for epoch in epochs])
        for key in sorted({key for epoch in epochs for _, sample in epoch for key in sample})
    ]


def _slope(role: str, quantity: str, days: list[float], epochs: list[list[float]]) -> Slope:
    values = [statistics.fmean(epoch) for epoch in epochs]
    mean = statistics.fmean(values)
    a_day, error = line_through(days, values)
    share = 700 / mean if mean else 0.0
    slope, error = a_day * share, error * share
    trend: Literal["flat", "grows", "shrinks", "unsure"] = "unsure"
    if abs(slope) > max(2 * error, FLAT_PERCENT_A_WEEK):
        trend = "grows" if slope > 0 else "shrinks"
    elif abs(slope) + 2 * error <= FLAT_PERCENT_A_WEEK:
        trend = "flat"
    return Slope(
        role=role,
        quantity=quantity,
        mean=round(mean, 1),
        a_day=round(a_day, 2),
        percent_a_week=round(slope, 2),
        percent_a_week_error=round(error, 2),
        trend=trend,
    )


def line_through(times: list[float], values: list[float]) -> tuple[float, float]:
    """The slope of the line of least squares, and its standard error.

    Residuals that follow each other count as fewer: their variance is multiplied by
    (1 + r) / (1 - r), where r is the correlation of neighbours if it is positive.
    """
    slope, start = statistics.linear_regression(times, values)
    residuals = [value - (start + slope * when) for when, value in zip(times, values, strict=True)]
    square = sum(each**2 for each in residuals)
    middle = statistics.fmean(times)
    spread = sum((when - middle) ** 2 for when in times)
    neighbours = sum(a * b for a, b in pairwise(residuals))
    r = min(0.9, max(0.0, neighbours / square)) if square else 0.0
    variance = square / (len(values) - 2) * (1 + r) / (1 - r)
    return slope, math.sqrt(variance / spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--days", type=at_least(1), default=Size.days)
    options = parser.parse_args()
    load = load_average()
    month = measure(Size(days=options.days))
    print_json({"load_average": load, **msgspec.to_builtins(month)})


if __name__ == "__main__":
    main()
