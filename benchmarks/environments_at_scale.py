"""Environment peers for hundreds of workers, in simulation: turns, bytes, load, and what waits.

    python -m benchmarks.environments_at_scale 500
    python -m benchmarks.environments_at_scale 500 --peers 4 --children 5 --dies
    python -m benchmarks.environments_at_scale 500 --greedy --quota 4

Prints one JSON object. Every worker plays eight episodes of four turns a minute in an environment
that is served; a call takes 0.05 s of a child. All join, settle, and then everything is counted for
a while of virtual time. With `--dies` one environment peer is killed for good as that begins. With
`--greedy` one more worker generates a hundred times as fast. The invariants of every simulation
hold throughout.

    turns_per_second    that workers were given
    wait_seconds        from a segment's end to the environment's turn after it, by worker
    calls_per_second    of each environment peer
    children_busy       share of the time that each peer's children work
    bytes_in, bytes_out of each environment peer, all its traffic, per call
    outcomes            of verdicts
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import trio
from msgspec.structs import replace

from benchmarks.common import at_least, spread_of
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios import Scenario
from simnet.scenarios.parts import SERVER, draw_line, start_bootstrap, start_over_time
from simnet.simulate import simulate
from simnet.simulation import SIMULATED, Peer, Plan, Simulation
from swarm.errors import SwarmError
from swarm.events import Event
from swarm.terminal.output import print_json

VALIDATORS = 2
CALL_SECONDS = 0.05
WORKLOAD = Workload(model_bytes=1_000_000, completion_tokens_mean=512.0, turns=3)
WORKER = Hardware(tokens_per_second=68.0)
"""Eight completions of 512 tokens take a minute."""
GREEDY = Hardware(tokens_per_second=6_800.0)
CHECKER = Hardware(prefill_tokens_per_second=400_000.0)
JOIN_SECONDS = 30.0
ADMITTED_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Setting:
    workers: int = 500
    peers: int = 1
    children: int = 20
    """Of each environment peer."""
    quota: float = 20.0
    """Requests per second that an environment peer answers a worker (`requests_per_second`)."""
    dies: bool = False
    greedy: bool = False
    settle: float = 90.0
    """Seconds of virtual time, like `measured`."""
    measured: float = 120.0


class Heard:
    """What the children of environment peers and workers did, and how submissions ended."""

    def __init__(self, simulation: Simulation) -> None:
        self.calls: Counter[str] = Counter()
        """By environment peer."""
        self.waits: dict[str, list[float]] = {}
        """By worker."""
        self.outcomes: Counter[str] = Counter()
        simulation.witnesses.append(self._witness)
        simulation.listeners.append(self._hear)

    def clear(self) -> None:
        self.calls.clear()
        self.waits.clear()
        self.outcomes.clear()

    def _witness(self, peer: Peer, what: str, facts: dict[str, Any]) -> None:
        if what == "turn_played":
            self.calls[peer.name] += 1
        elif what == "turn_given":
            self.waits.setdefault(peer.name, []).append(facts["seconds"])

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        if event.name == "validator.verdict":
            self.outcomes[event.fields["outcome"]] += 1


def measured(setting: Setting) -> dict[str, Any]:
    """Simulate it; raises `SwarmError` if an invariant was violated."""

    async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
        return await _run(simulation, setting)

    peers = setting.workers + setting.greedy + setting.peers + VALIDATORS + 2
    report = simulate(Scenario("environments_at_scale", "", peers, peers, run, WORKLOAD))
    if report["violations"]:
        raise SwarmError(f"the simulation broke an invariant: {'; '.join(report['violations'])}")
    figures: dict[str, Any] = report["figures"]
    return figures


async def _run(simulation: Simulation, setting: Setting) -> dict[str, Any]:
    validators = [f"validator-{number}" for number in range(VALIDATORS)]
    environments = [f"environment-{number}" for number in range(setting.peers)]
    await start_bootstrap(
        simulation,
        trainers=["trainer"],
        validators=validators,
        environment_peers=environments,
        environments=[replace(SIMULATED, where="served")],
        steps=100_000,
        groups_per_step=40 * setting.workers,
        group_size=4,
        groups_per_submission=2,
        max_new_tokens=2048,
    )
    settings = {"children": setting.children, "requests_per_second": setting.quota}
    tables = {"environment": settings}
    machine = Hardware(environment_seconds=CALL_SECONDS)
    served = [
        simulation.add(Plan(name, ["environment"], SERVER, machine, tables=tables))
        for name in environments
    ]
    trusted = [simulation.add(Plan(name, ["validator"], SERVER, CHECKER)) for name in validators]
    trusted.append(simulation.add(Plan("trainer", ["trainer"], SERVER)))
    for peer in (*trusted, *served):
        await peer.start()
    workers = [
        simulation.add(Plan(f"worker-{n}", ["inference"], draw_line(simulation.random), WORKER))
        for n in range(setting.workers)
    ]
    if setting.greedy:
        workers.append(simulation.add(Plan("greedy", ["inference"], SERVER, GREEDY)))
    admitted = simulation.expect("membership.admitted", [peer.name for peer in workers])
    heard = Heard(simulation)
    await start_over_time(simulation, workers, JOIN_SECONDS)
    await simulation.meet(admitted, ADMITTED_SECONDS)
    await trio.sleep(setting.settle)
    network = simulation.network
    sent, received = network.bytes_by_sender.copy(), network.bytes_by_receiver.copy()
    dropped = simulation.trace.counts["environment.request_dropped"]
    heard.clear()
    if setting.dies:
        await served[0].kill()
    await trio.sleep(setting.measured)
    living = [peer for peer in served if peer.alive]
    seconds = setting.measured
    honest = [each for name, waits in heard.waits.items() if name != "greedy" for each in waits]
    return {
        **dataclasses.asdict(setting),
        "turns_per_second": round(len(honest) / seconds, 2),
        "wait_seconds": _waits(honest),
        "workers_given_turns": sum(name != "greedy" for name in heard.waits),
        "calls_per_second": {
            peer.name: round(heard.calls[peer.name] / seconds, 2) for peer in living
        },
        "children_busy": {
            peer.name: round(heard.calls[peer.name] * CALL_SECONDS / seconds / setting.children, 3)
            for peer in living
        },
        "bytes_in": _per_call(living, network.bytes_by_receiver - received, heard),
        "bytes_out": _per_call(living, network.bytes_by_sender - sent, heard),
        "outcomes": dict(sorted(heard.outcomes.items())),
        "greedy_turns_per_second": round(len(heard.waits.get("greedy", ())) / seconds, 2),
        "requests_dropped": simulation.trace.counts["environment.request_dropped"] - dropped,
    }


def _waits(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return spread_of(ordered, 3) | {"p99": round(ordered[int(0.99 * (len(ordered) - 1))], 3)}


def _per_call(peers: Sequence[Peer], counted: Counter[Any], heard: Heard) -> dict[str, int]:
    return {peer.name: round(counted[peer.id] / max(1, heard.calls[peer.name])) for peer in peers}


def main() -> None:
    parser = argparse.ArgumentParser(description="Environment peers of many workers, simulated.")
    parser.add_argument("workers", type=at_least(1))
    for name in ("peers", "children"):
        default = getattr(Setting, name)
        parser.add_argument(f"--{name}", type=at_least(1), default=default, metavar="NUMBER")
    for name in ("quota", "settle", "measured"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Setting, name))
    for name in ("dies", "greedy"):
        parser.add_argument(f"--{name}", action="store_true")
    print_json(measured(Setting(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
