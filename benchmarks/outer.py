"""Share of the time that several trainers compute, and what they send, beside published figures.

    python -m benchmarks.outer --trainers 3 8 14 30 --gigabits 1 4 10 --parameters 1e9 10e9

Prints one JSON object per line, as soon as it is known. `published`: INTELLECT-1's 38 minutes of
inner steps and its three times of synchronisation. `simulated`: trainers on seven continents' lines
exchange contributions in int8, 0.87 bytes per parameter, for each number of trainers, speed of
their lines and size of the model, merged in one shard per trainer (`--shards` for another number;
1: everyone merges everything). The production code runs in virtual time; contributions and lines
are smaller by the same factor. Synchronisation lasts from a trainer's contribution to its next
outer state. All trainers end their inner steps at once, so it holds no wait for a slower one.

`bytes_per_parameter`: what a trainer receives and sends in the last round, of all files. `ring`:
what synchronous training of the same number would send in the inner steps of a round, 2 (N − 1) / N
gradients per step. `ring_of_int8`: INTELLECT-1's own average of int8 values, once a round.

With `--uneven quarter` one trainer's lines have a quarter of that speed, and everyone waits for it;
with `--uneven drop` they fall to 1 Mb/s after the first round, and the others wait for
`GRACE_SECONDS`. `synchronisation_seconds` is then the median of the trainers, `slowest_seconds` the
most of one that ends the round.

`python -m benchmarks.outer --run 60` runs the scenario of that many trainers instead, with deaths
and a partition, and prints its CPU seconds; equal seeds have equal traces.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import Any, Literal

from benchmarks.common import at_least
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.lines import REGIONS, Line
from simnet.scenarios.parts import start_bootstrap
from simnet.scenarios.several_trainers import Agreement
from simnet.simulate import simulate as run_scenario
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.wire.manifest import SHARDS_MAX, Outer

COMPUTE_SECONDS = 38 * 60.0
"""Inner steps of a round of INTELLECT-1 (arXiv 2412.01152)."""

INNER_STEPS = 100
"""Of a round of INTELLECT-1."""

PUBLISHED_SECONDS = {"united states": 103.0, "transatlantic": 382.0, "global": 469.0}
"""Its median times of synchronisation."""

CODED = 0.87
"""Bytes per parameter of a contribution in int8, as measured (docs/several-trainers.md)."""

Uneven = Literal["", "quarter", "drop"]

SIMULATED_BYTES = 40_000_000
"""Least size of a simulated contribution: 153 pieces. A real one of 8.7 GB has 2,100. With many
shards a part has so few pieces that round trips weigh more than in reality: `--megabytes`."""

LINE_BYTES_PER_SECOND = 2.3e6
"""Slowest simulated line. On a slower one pieces, of which there are fewer than in reality, would
take so much longer than in reality that they miss their deadlines."""

SIMULATED_COMPUTE_SECONDS = 30.0
"""Duration of the simulated inner steps, on which synchronisation does not depend."""

MACHINE_BYTES_PER_SECOND = 2e9
"""Assumed speed of a trainer's disks, and of its merge for each contribution."""

DROPPED_BYTES_PER_SECOND = 1e6 / 8
GRACE_SECONDS = 60.0

ROUNDS = 2
VIRTUAL_SECONDS_MAX = 24 * 3600.0


def utilisation(synchronisation_seconds: float) -> float:
    """Share of a round that is spent on inner steps."""
    return COMPUTE_SECONDS / (COMPUTE_SECONDS + synchronisation_seconds)


def ring(trainers: int, value_bytes: float) -> float:
    """Bytes per parameter that one of a ring sends to average values of so many bytes."""
    return 2 * (trainers - 1) / trainers * value_bytes


def simulate(
    trainers: int,
    parameters: float,
    gigabits: float,
    shards: int,
    seed: int,
    uneven: Uneven = "",
    least_bytes: int = SIMULATED_BYTES,
) -> dict[str, Any]:
    """Run two rounds; return the second's synchronisation: the first opens the connections."""
    shards = min(shards or trainers, SHARDS_MAX)
    real = parameters * CODED
    slowest = gigabits / 4 if uneven == "quarter" else gigabits
    size = max(least_bytes, int(LINE_BYTES_PER_SECOND * real / (slowest * 1e9 / 8)))
    scale = size / real
    line = gigabits * 1e9 / 8 * scale
    machine = MACHINE_BYTES_PER_SECOND * scale
    names = [f"trainer-{number}" for number in range(trainers)]
    odd = names[-1]
    ending = [name for name in names if name != odd or uneven != "drop"]
    simulation = Simulation(seed, workload=Workload(model_bytes=size))
    agreement = Agreement(simulation)
    moved: dict[str, list[tuple[int, int]]] = {name: [] for name in names}

    def hear(_: float, peer: Peer, event: Event) -> None:
        if event.name == "outer.merged" and peer.node is not None:
            traffic = peer.node.transport.traffic
            moved[peer.name].append((traffic.received, traffic.sent))

    simulation.listeners.append(hear)

    async def main() -> None:
        async with simulation.running():
            grace = GRACE_SECONDS if uneven == "drop" else 3600.0
            outer = Outer(
                rounds=ROUNDS, grace_seconds=grace, deadline_seconds=7200.0, shards=shards
            )
            await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=outer)
            hardware = Hardware(
                step_seconds=SIMULATED_COMPUTE_SECONDS, load_bytes_per_second=machine
            )
            for number, name in enumerate(names):
                speed = line / 4 if name == odd and uneven == "quarter" else line
                place = Line(REGIONS[number % len(REGIONS)], speed, speed)
                peer = simulation.add(Plan(name, ["replica"], place, hardware))
                peer.disk.bytes_per_second = machine
                await peer.start()
            first = simulation.expect("outer.merged", names)
            done = simulation.expect("outer.run_complete", ending)
            await simulation.meet(first, VIRTUAL_SECONDS_MAX)
            if uneven == "drop":
                simulation.network.narrow(
                    simulation.peers[odd].id, DROPPED_BYTES_PER_SECOND * scale
                )
            await simulation.meet(done, VIRTUAL_SECONDS_MAX)

    began = time.process_time()
    run_virtual(main, seed=seed, limit_seconds=VIRTUAL_SECONDS_MAX)
    if simulation.violations:
        return {"violations": simulation.violations}
    took = agreement.synchronisation[-len(ending) :]
    seconds = median(took)
    each = [
        median(moved[name][-1][way] - moved[name][0][way] for name in ending) / size * CODED
        for way in (0, 1)
    ]
    return {
        "trainers": trainers,
        "parameters": parameters,
        "gigabits_per_second": gigabits,
        "shards": shards,
        "uneven": uneven,
        "synchronisation_seconds": round(seconds, 1),
        "slowest_seconds": round(max(took), 1),
        "utilisation": round(utilisation(seconds), 4),
        "bytes_per_parameter": {"received": round(each[0], 3), "sent": round(each[1], 3)},
        "ring_of_int8": round(ring(trainers, 1.0), 3),
        "ring": {
            name: round(INNER_STEPS * ring(trainers, size), 1)
            for name, size in (("fp32", 4.0), ("bf16", 2.0))
        },
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainers", type=at_least(2), nargs="+", default=[3, 14])
    parser.add_argument("--parameters", type=float, nargs="+", default=[10e9])
    parser.add_argument("--gigabits", type=float, nargs="+", default=[4.0, 10.0])
    parser.add_argument("--shards", type=at_least(0), default=0, help="0: one per trainer")
    parser.add_argument("--uneven", choices=["quarter", "drop"], default="")
    parser.add_argument(
        "--megabytes",
        type=at_least(1),
        default=SIMULATED_BYTES // 10**6,
        help="least size of a simulated contribution; more is nearer to reality, and takes longer",
    )
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument("--run", type=at_least(2), help="trainers of the scenario to run instead")
    return parser.parse_args()


def main() -> None:
    given = read_arguments()
    if given.run:
        began = time.process_time()
        report = run_scenario("several-trainers", peers=given.run, seed=given.seed)
        cpu = round(time.process_time() - began, 1)
        told = ("trace_hash", "violations", "figures")
        say({"cpu_seconds": cpu, **{key: report[key] for key in told}})
        return
    say({"compute_seconds": COMPUTE_SECONDS, "inner_steps": INNER_STEPS})
    for where, seconds in PUBLISHED_SECONDS.items():
        used = round(utilisation(seconds), 4)
        say({"published": where, "synchronisation_seconds": seconds, "utilisation": used})
    for trainers in given.trainers:
        for parameters in given.parameters:
            for gigabits in given.gigabits:
                print(f"{trainers} trainers, {gigabits:g} Gb/s …", file=sys.stderr, flush=True)
                cell = trainers, parameters, gigabits
                more = given.uneven, given.megabytes * 10**6
                say(simulate(*cell, given.shards, given.seed, *more))


if __name__ == "__main__":
    main()
