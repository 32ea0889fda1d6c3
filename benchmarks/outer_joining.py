"""What it takes a trainer to join a run, and what it costs the others, in the simulator.

    python -m benchmarks.outer_joining --gigabits 1 4

Prints one JSON object for each speed and way of joining as soon as it is known. Of `--trainers`
(14) on seven continents' lines, one starts within the inner steps of the third round and fetches
the outer state, `--gigabytes` (10) of it, from the others. The production code runs in virtual
time; state and lines are smaller by the same factor, disks and merge move 2 GB/s, and inner steps
last 200 s, so that a fetch ends within one round as it does at INTELLECT-1's 38.

    fetch_seconds           from the first request for the state until it is checked
    joined_seconds          from the newcomer's start until its first inner steps
    counted_round           the round that its first contribution counts in, and
    contributed_to          the one that it was made for
    waited_seconds          how long the others waited for it at the boundary of a round
    longest_round_seconds   the longest round of the others from then on, and
    round_seconds           the round before
    sent_gigabytes          most that one of the others sent more than in the round before
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import pairwise
from typing import Any, Literal

from benchmarks.common import at_least
from benchmarks.outer import LINE_BYTES_PER_SECOND, MACHINE_BYTES_PER_SECOND, VIRTUAL_SECONDS_MAX
from simnet.clock import run_virtual
from simnet.compute.outer import STATE_SHARE
from simnet.compute.setting import Hardware, Workload
from simnet.lines import REGIONS, Line
from simnet.scenarios.parts import start_bootstrap
from simnet.scenarios.several_trainers import Agreement
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.terminal.output import print_json
from swarm.wire.manifest import Outer

SIMULATED_BYTES = 1_250_000
"""Least size of a simulated contribution; a state has `STATE_SHARE` times as much: 40 pieces."""

STEP_SECONDS = 200.0
ROUNDS = 5
STARTS_IN = 3
"""The round in which the newcomer starts: earlier it would merge the contributions so far, instead
of fetching a state (`outer.staleness_max` is 0)."""

Join = Literal["free", "blocking"]


def simulated_bytes(gigabytes: float, gigabits: float) -> int:
    """Size of a simulated contribution with which the lines are as fast as pieces need."""
    real = gigabytes * 1e9 / STATE_SHARE
    return max(SIMULATED_BYTES, int(LINE_BYTES_PER_SECOND * real / (gigabits * 1e9 / 8)))


class Watched:
    """What the trainers of a simulation say of their rounds."""

    def __init__(self, simulation: Simulation) -> None:
        self.fields: dict[str, dict[str, Any]] = {}
        """The newcomer's first event of each name."""
        self.merged: dict[str, list[float]] = defaultdict(list)
        self.sent: dict[str, dict[int, float]] = defaultdict(dict)
        """Bytes that each of the others sent from the beginning of a round to that of the next."""
        self.counted_round = 0
        self.waiting_since: dict[str, float] = {}
        self.waited = 0.0
        simulation.listeners.append(self._hear)

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        if peer.name == "newcomer":
            self.fields.setdefault(event.name, event.fields)
            counts = event.name == "outer.merged" and peer.id in event.fields["trainers"]
            if counts and not self.counted_round:
                self.counted_round = event.fields["round"]
            return
        if event.name == "outer.merged":
            self.merged[peer.name].append(now)
        elif event.name == "outer.join_awaited":
            self.waiting_since[peer.name] = now
        elif event.name == "outer.contributed":
            before = event.fields["round"] - 1
            self.sent[peer.name][before] = event.fields["figures"]["bytes_sent"]
            if peer.name in self.waiting_since:
                began = now - event.fields["seconds"]
                self.waited = max(self.waited, began - self.waiting_since.pop(peer.name))

    def round_seconds(self) -> list[float]:
        """Most seconds between two merges of one of the others, by round from the second on."""
        of_each = [[b - a for a, b in pairwise(times)] for times in self.merged.values()]
        return [max(seconds) for seconds in zip(*of_each, strict=True)]


def simulate(
    trainers: int, gigabytes: float, gigabits: float, seed: int, join: Join
) -> tuple[Watched, Agreement]:
    """Run a few rounds, with a newcomer."""
    size = simulated_bytes(gigabytes, gigabits)
    scale = size * STATE_SHARE / (gigabytes * 1e9)
    line, machine = gigabits * 1e9 / 8 * scale, MACHINE_BYTES_PER_SECOND * scale
    names = [*(f"trainer-{number}" for number in range(1, trainers)), "newcomer"]
    simulation = Simulation(seed, workload=Workload(model_bytes=size))
    watched, agreement = Watched(simulation), Agreement(simulation)

    async def main() -> None:
        async with simulation.running():
            outer = Outer(rounds=ROUNDS, join=join, staleness_max=0, deadline_seconds=7200.0)
            await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=outer)
            hardware = Hardware(step_seconds=STEP_SECONDS, load_bytes_per_second=machine)
            for number, name in enumerate(names):
                place = Line(REGIONS[number % len(REGIONS)], line, line)
                peer = simulation.add(Plan(name, ["replica"], place, hardware))
                peer.disk.bytes_per_second = machine
                if name != "newcomer":
                    await peer.start()
            done = simulation.expect("outer.run_complete", names)
            begun = simulation.expect(
                "outer.merged",
                names[:-1],
                lambda event: bool(event.fields["round"] >= STARTS_IN - 1),
            )
            await simulation.meet(begun, VIRTUAL_SECONDS_MAX)
            await simulation.peers["newcomer"].start()
            await simulation.meet(done, VIRTUAL_SECONDS_MAX)

    run_virtual(main, seed=seed, limit_seconds=VIRTUAL_SECONDS_MAX)
    assert not simulation.violations, simulation.violations
    return watched, agreement


def measure(
    trainers: int, gigabytes: float, gigabits: float, seed: int, join: Join
) -> dict[str, Any]:
    watched, agreement = simulate(trainers, gigabytes, gigabits, seed, join)
    scale = simulated_bytes(gigabytes, gigabits) * STATE_SHARE / gigabytes  # bytes of one GB
    more = [sent[STARTS_IN] - sent[STARTS_IN - 1] for sent in watched.sent.values()]
    return {
        "trainers": trainers,
        "gigabytes": gigabytes,
        "gigabits_per_second": gigabits,
        "join": join,
        "fetch_seconds": round(watched.fields["outer.recovered"]["seconds"], 1),
        "joined_seconds": round(agreement.joined[-1], 1),
        "contributed_to": watched.fields["outer.contributed"]["round"],
        "counted_round": watched.counted_round,
        "waited_seconds": round(watched.waited, 1),
        "longest_round_seconds": round(max(watched.round_seconds()[STARTS_IN - 2 :]), 1),
        "round_seconds": round(watched.round_seconds()[STARTS_IN - 3], 1),
        "sent_gigabytes": round(max(more) / scale, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", type=at_least(3), default=14)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--seed", type=at_least(0), default=1)
    given = parser.parse_args()
    joins: tuple[Join, ...] = ("free", "blocking")
    for gigabits in given.gigabits:
        which = given.trainers, given.gigabytes, gigabits, given.seed
        for join in joins:
            print_json(measure(*which, join))


if __name__ == "__main__":
    main()
