"""The simulator's costs, and the network's figures with a thousand peers.

    python -m benchmarks.simulator steady --peers 1000
    python -m benchmarks.simulator join --peers 5000
    python -m benchmarks.simulator dht --peers 1000
    python -m benchmarks.simulator gossip --peers 1000

Prints one JSON object: virtual and processor seconds, messages per processor second, peak memory,
and the figures of the scenario or experiment. `steady` counts from when all peers have joined to
the end.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import trio

from benchmarks.common import timed
from benchmarks.protocols import measure_dht, measure_gossip
from simnet import scenarios
from simnet.clock import run_virtual
from simnet.large_pages import use_large_pages
from simnet.simulation import Peer, Simulation
from swarm.events import Event
from swarm.terminal.output import print_json


class Meter:
    """Processor seconds over virtual time: a listener of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._marks: list[tuple[float, float, int]] = []
        self._next = 0.0
        simulation.listeners.append(self._hear)

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        if now >= self._next:
            self._next = now + 0.5
            self.mark(now)

    def mark(self, now: float) -> None:
        """Record the seconds spent so far."""
        self._marks.append((now, time.process_time(), self._simulation.network.messages))

    def spent(self, begun: float) -> dict[str, float]:
        """Seconds spent on the virtual time from `begun` on."""
        first = next(mark for mark in self._marks if mark[0] >= begun)
        return costs(*(last - early for last, early in zip(self._marks[-1], first, strict=True)))


def costs(virtual: float, cpu: float, messages: float) -> dict[str, float]:
    """The figures every command prints."""
    return {
        "virtual_seconds": round(virtual, 1),
        "cpu_seconds": round(cpu, 1),
        "times_real_time": round(virtual / cpu, 2),
        "messages": messages,
        "messages_per_second": round(messages / cpu),
        "cpu_microseconds_per_message": round(1e6 * cpu / max(1, messages)),
    }


def run_scenario(name: str, peers: int, seed: int) -> dict[str, Any]:
    """Run a scenario; return its figures, its whole costs, and those of its steady part, if any."""
    scenario = scenarios.load(name)
    simulation = Simulation(seed, workload=scenario.workload)
    meter = Meter(simulation)
    figures: dict[str, Any] = {}

    async def main() -> None:
        async with simulation.running():
            meter.mark(0.0)
            figures.update(await scenario.run(simulation, peers))
            meter.mark(trio.current_time())

    run_virtual(main, seed=seed)
    whole = meter.spent(0.0)
    steady = meter.spent(figures.get("steady_from_seconds", 0.0))
    return {
        **steady,
        **({"whole": whole} if steady != whole else {}),
        "violations": simulation.violations,
        "figures": figures,
    }


def run_experiment(name: str, peers: int, seed: int) -> dict[str, Any]:
    """Run an experiment on one protocol; return its figures and costs."""
    figures, cpu = timed(measure_dht if name == "dht" else measure_gossip, peers, seed)
    spent = costs(figures.pop("virtual_seconds"), cpu, figures.pop("messages"))
    return {**spent, "figures": figures}


def main() -> None:
    use_large_pages()
    parser = argparse.ArgumentParser(description="What the simulator costs and shows.")
    parser.add_argument("what", choices=("steady", "join", "dht", "gossip"))
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    scenario = options.what in scenarios.names()
    figures = (run_scenario if scenario else run_experiment)(
        options.what, options.peers, options.seed
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = {"what": options.what, "peers": options.peers, "seed": options.seed, **figures}
    print_json(report | {"peak_rss_bytes": peak})


if __name__ == "__main__":
    main()
