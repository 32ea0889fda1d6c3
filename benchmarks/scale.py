"""Workers, a thousand say, of one trainer and three validators, in simulation.

    python -m benchmarks.scale 1000
    python -m benchmarks.scale 300 --settle 20 --measured 60

Prints one JSON object. All peers join, settle, and then everything is counted for a
while (`Durations`), in which every worker hands in a submission a minute. The invariants of every
simulation hold throughout (`simnet.invariants`). In the measured interval, rates per second of
virtual time:

    admitted_seconds    from a worker's start to its first admission
    connections_…       of each validator and the trainer, and of each worker, at all samples
    new_connections     of all peers together; each costs both ends a handshake of 3 ms
    submissions         acknowledged by a validator
    waiting             acknowledged submissions without a receipt, at all samples
    receipt_seconds     from the acknowledgement to the receipt; null if none came
    messages_…          control messages that a peer sends
    bytes_per_peer      of control messages
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import trio

from benchmarks.common import at_least, memory_of, spread_of
from simnet.compute.setting import Hardware
from simnet.scenarios import Scenario
from simnet.scenarios.parts import SERVER, draw_line, start_bootstrap, start_over_time
from simnet.scenarios.steady import WORKER, WORKLOAD
from simnet.simulate import simulate
from simnet.simulation import Peer, Plan, Simulation
from swarm.errors import SwarmError
from swarm.events import Event
from swarm.terminal.output import print_json

VALIDATORS = 3
RELAYS = 20
ADMITTED_SECONDS = 120.0
"""Deadline for everybody's admission, from the start of the last peer."""

SAMPLE_SECONDS = 5.0
"""Between two counts of connections and of submissions without a verdict."""

CHECKER = Hardware(prefill_tokens_per_second=400_000.0)
"""A validator's machine: it checks twelve submissions a second of the six that it gets."""


@dataclasses.dataclass(frozen=True)
class Durations:
    """Seconds of virtual time."""

    join: float = 60.0
    """Within which all peers start."""
    settle: float = 60.0
    measured: float = 120.0


class Receipts:
    """Listener that measures the time from each acknowledgement to the receipt."""

    def __init__(self, simulation: Simulation) -> None:
        self.waiting: dict[tuple[str, int, int], float] = {}
        self.seconds: list[float] = []
        simulation.listeners.append(self._hear)

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        if event.name == "inference.submission_delivered":
            self.waiting[peer.name, event.fields["step"], event.fields["number"]] = now
        elif event.name == "inference.receipt":
            key = peer.name, event.fields["step"], event.fields["number"]
            since = self.waiting.pop(key, None)
            if since is not None:
                self.seconds.append(now - since)


def measured(workers: int, durations: Durations, checker: Hardware = CHECKER) -> dict[str, Any]:
    """Simulate this many workers; `checker` is each validator's machine."""

    async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
        return await _run(simulation, workers, durations, checker)

    peers = workers + VALIDATORS + RELAYS + 2
    scenario = Scenario("scale", "", peers, peers, run, WORKLOAD)
    report = simulate(scenario, shows_progress=True)
    if not report["figures"]:
        raise SwarmError(f"the simulation broke an invariant: {'; '.join(report['violations'])}")
    return {**report["figures"], "violations": report["violations"]}


async def _run(
    simulation: Simulation, count: int, durations: Durations, checker: Hardware
) -> dict[str, Any]:
    validators = [f"validator-{number}" for number in range(VALIDATORS)]
    await start_bootstrap(
        simulation, trainers=["trainer"], validators=validators, steps=100_000,
        groups_per_step=20 * count,
    )  # fmt: skip
    trusted = [simulation.add(Plan(name, ["validator"], SERVER, checker)) for name in validators]
    trusted.append(simulation.add(Plan("trainer", ["trainer"], SERVER)))
    for peer in trusted:
        await peer.start()
    relays = [simulation.add(Plan(f"relay-{i}", ["relay"], SERVER)) for i in range(RELAYS)]
    workers = [
        simulation.add(Plan(f"worker-{i}", ["inference"], draw_line(simulation.random), WORKER))
        for i in range(count)
    ]
    names = [peer.name for peer in (*relays, *workers)]
    listening = simulation.expect("peer.listening", names)
    admitted = simulation.expect("membership.admitted", names)
    receipts = Receipts(simulation)
    await start_over_time(simulation, [*relays, *workers], durations.join)
    await simulation.meet(admitted, ADMITTED_SECONDS)
    await trio.sleep(durations.settle)
    joined = [admitted.times[name] - listening.times[name] for name in admitted.times]
    return await _measured(simulation, durations, joined, trusted, workers, receipts)


async def _measured(
    simulation: Simulation,
    durations: Durations,
    joined: list[float],
    trusted: list[Peer],
    workers: list[Peer],
    receipts: Receipts,
) -> dict[str, Any]:
    network = simulation.network
    counts, sent = simulation.trace.counts.copy(), network.messages_by_sender.copy()
    bytes_sent, joins = network.bytes_sent, network.connections_made
    receipts.seconds.clear()
    held_trusted: list[int] = []
    held_workers: list[int] = []
    waiting: list[int] = []
    for _ in range(round(durations.measured / SAMPLE_SECONDS)):
        await trio.sleep(SAMPLE_SECONDS)
        held_trusted += _connections(trusted)
        held_workers += _connections(workers)
        waiting.append(len(receipts.waiting))
    happened = simulation.trace.counts - counts
    sent = network.messages_by_sender - sent

    def rate(peers: Sequence[Peer]) -> dict[str, float]:
        return spread_of(sent[peer.id] / durations.measured for peer in peers)

    seconds = sorted(receipts.seconds)
    return {
        "workers": len(workers),
        "durations": dataclasses.asdict(durations),
        "virtual_seconds": round(simulation.now(), 1),
        "processor_seconds": round(time.process_time(), 1),
        "resident_mib": round(memory_of(os.getpid()).resident),
        "admitted_seconds": spread_of(joined),
        "connections_trusted": spread_of(held_trusted),
        "connections_worker": spread_of(held_workers),
        "new_connections": round((network.connections_made - joins) / durations.measured, 2),
        "submissions": round(happened["inference.submission_delivered"] / durations.measured, 2),
        "verdicts": round(happened["validator.verdict"] / durations.measured, 2),
        "waiting": spread_of(waiting),
        "receipt_seconds": spread_of(seconds) if seconds else None,
        "receipt_seconds_p99": round(seconds[int(0.99 * (len(seconds) - 1))], 2)
        if seconds
        else None,
        "messages_worker": rate(workers),
        "messages_trusted": rate(trusted),
        "bytes_per_peer": round((network.bytes_sent - bytes_sent) / durations.measured / len(sent)),
        "leases_lost": happened["membership.lease_lost"],
    }


def _connections(peers: Sequence[Peer]) -> list[int]:
    return [len(peer.node.transport.connected()) for peer in peers if peer.node is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description="Workers of one trainer, in simulation.")
    parser.add_argument("workers", type=at_least(1))
    for name, seconds in dataclasses.asdict(Durations()).items():
        parser.add_argument(f"--{name}", type=float, default=seconds, metavar="SECONDS")
    options = vars(parser.parse_args())
    result = measured(options.pop("workers"), Durations(**options))
    print_json(result)


if __name__ == "__main__":
    main()
