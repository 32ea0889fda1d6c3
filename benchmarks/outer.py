"""Share of the time that several trainers compute, with published timings and in the simulator.

    python -m benchmarks.outer --trainers 8 --gigabits 4 10

Prints one JSON object. `published`: INTELLECT-1's 38 minutes of inner steps and its three times of
synchronisation. `simulated`: trainers on seven continents' lines exchange contributions of
`--gigabytes` (10: a model of 10 billion parameters in int8), for each speed of their lines. The
production code runs in virtual time; contributions and lines are smaller by the same factor.
Synchronisation lasts from a trainer's contribution to its next outer state. All trainers end their
inner steps at once, so it holds no wait for a slower one.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from benchmarks.common import at_least
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.lines import REGIONS, Line
from simnet.scenarios.parts import start_bootstrap
from simnet.scenarios.several_trainers import Agreement
from simnet.simulation import Plan, Simulation
from swarm.terminal.output import print_json
from swarm.wire.manifest import Outer

COMPUTE_SECONDS = 38 * 60.0
"""Inner steps of a round of INTELLECT-1 (arXiv 2412.01152)."""

PUBLISHED_SECONDS = {"united states": 103.0, "transatlantic": 382.0, "global": 469.0}
"""Its median times of synchronisation."""

SIMULATED_BYTES = 40_000_000
"""Size of a simulated contribution: 153 pieces. A real one of 10 GB has 2,400."""

SIMULATED_COMPUTE_SECONDS = 30.0
"""Duration of the simulated inner steps, on which synchronisation does not depend."""

MACHINE_BYTES_PER_SECOND = 2e9
"""Assumed speed of a trainer's disks, and of its merge for each contribution."""

ROUNDS = 2
VIRTUAL_SECONDS_MAX = 24 * 3600.0


def utilisation(synchronisation_seconds: float) -> float:
    """Share of a round that is spent on inner steps."""
    return COMPUTE_SECONDS / (COMPUTE_SECONDS + synchronisation_seconds)


def simulate(trainers: int, gigabytes: float, gigabits: float, seed: int) -> dict[str, Any]:
    """Run two rounds; return the second's synchronisation: the first opens the connections."""
    scale = SIMULATED_BYTES / (gigabytes * 1e9)
    line = gigabits * 1e9 / 8 * scale
    machine = MACHINE_BYTES_PER_SECOND * scale
    names = [f"trainer-{number}" for number in range(trainers)]
    simulation = Simulation(seed, workload=Workload(model_bytes=SIMULATED_BYTES))
    agreement = Agreement(simulation)

    async def main() -> None:
        async with simulation.running():
            outer = Outer(rounds=ROUNDS, grace_seconds=3600.0, deadline_seconds=7200.0)
            await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=outer)
            hardware = Hardware(
                step_seconds=SIMULATED_COMPUTE_SECONDS, load_bytes_per_second=machine
            )
            for number, name in enumerate(names):
                place = Line(REGIONS[number % len(REGIONS)], line, line)
                peer = simulation.add(Plan(name, ["replica"], place, hardware))
                peer.disk.bytes_per_second = machine
                await peer.start()
            done = simulation.expect("outer.run_complete", names)
            await simulation.meet(done, VIRTUAL_SECONDS_MAX)

    run_virtual(main, seed=seed, limit_seconds=VIRTUAL_SECONDS_MAX)
    seconds = agreement.synchronisation[-trainers:]
    bits = gigabytes * 8
    return {
        "trainers": trainers,
        "gigabytes": gigabytes,
        "gigabits_per_second": gigabits,
        "synchronisation_seconds": round(median(seconds), 1),
        "transfer_seconds_least": round((trainers - 1) * bits / gigabits, 1),
        "utilisation": round(utilisation(median(seconds)), 4),
        "violations": simulation.violations,
    }


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainers", type=at_least(2), default=8)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[4.0, 10.0])
    parser.add_argument("--seed", type=at_least(0), default=1)
    return parser.parse_args()


def main() -> None:
    given = read_arguments()
    print_json(
        {
            "compute_seconds": COMPUTE_SECONDS,
            "published": [
                {
                    "where": where,
                    "synchronisation_seconds": seconds,
                    "utilisation": round(utilisation(seconds), 4),
                }
                for where, seconds in PUBLISHED_SECONDS.items()
            ],
            "simulated": [
                simulate(given.trainers, given.gigabytes, gigabits, given.seed)
                for gigabits in given.gigabits
            ],
        }
    )


if __name__ == "__main__":
    main()
