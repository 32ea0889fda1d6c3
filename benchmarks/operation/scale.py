"""A thousand workers of one trainer and three validators, in simulation.

All peers join within `JOIN_SECONDS`. After `SETTLE_SECONDS` every worker hands in a submission a
minute, and everything of the next `MEASURED_SECONDS` is counted. The invariants of every simulation
hold throughout (`simnet.invariants`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from benchmarks.operation.report import Spread, spread_of
from simnet.compute.setting import Hardware
from simnet.lines import Weather
from simnet.scenarios import Scenario
from simnet.scenarios.parts import SERVER, draw_line, start_bootstrap, start_over_time
from simnet.scenarios.steady import WORKER, WORKLOAD
from simnet.simulate import simulate
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event

WORKERS = 1000
VALIDATORS = 3
RELAYS = 20
JOIN_SECONDS = 60.0
ADMITTED_SECONDS = 120.0
"""Deadline for everybody's admission, from the start of the last peer."""

SETTLE_SECONDS = 60.0
MEASURED_SECONDS = 120.0
SAMPLE_SECONDS = 5.0
"""Between two counts of connections and of submissions without a verdict."""

CHECKER = Hardware(prefill_tokens_per_second=400_000.0)
"""A validator's machine: it checks twelve submissions a second of the six that it gets."""


class Scale(msgspec.Struct, frozen=True):
    """Rates are per second of virtual time, in the measured interval."""

    workers: int
    admitted_seconds: Spread
    """From a worker's start to its first admission."""
    connections_trusted: Spread
    """Of each validator and the trainer, at all samples."""
    connections_worker: Spread
    new_connections: float
    """Of all peers together, per second; each costs both ends a handshake of 3 ms."""
    submissions: float
    """Acknowledged by a validator, per second."""
    verdicts: float
    waiting: Spread
    """Submissions that were acknowledged and have no receipt yet, at all samples."""
    receipt_seconds: Spread
    """From the acknowledgement to the receipt."""
    receipt_seconds_p99: float
    messages_worker: Spread
    """Control messages that a worker sends, per second."""
    messages_trusted: Spread
    bytes_per_peer: float
    """Of control messages, per second and peer."""
    leases_lost: int
    violations: list[str]


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


def measure() -> Scale:
    return measured(WORKERS)


def measured(workers: int, checker: Hardware = CHECKER) -> Scale:
    """Simulate this many workers; `checker` is each validator's machine."""
    found: list[Scale] = []

    async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
        found.append(await _run(simulation, workers, checker))
        return {}

    peers = workers + VALIDATORS + RELAYS + 2
    report = simulate(Scenario("scale", "", peers, peers, run, Weather(), WORKLOAD))
    return msgspec.structs.replace(found[0], violations=report["violations"])


async def _run(simulation: Simulation, count: int, checker: Hardware) -> Scale:
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
    await start_over_time(simulation, [*relays, *workers], JOIN_SECONDS)
    await simulation.meet(admitted, ADMITTED_SECONDS)
    await trio.sleep(SETTLE_SECONDS)
    joined = [admitted.times[name] - listening.times[name] for name in admitted.times]
    return await _measured(simulation, joined, trusted, workers, receipts)


async def _measured(
    simulation: Simulation,
    joined: list[float],
    trusted: list[Peer],
    workers: list[Peer],
    receipts: Receipts,
) -> Scale:
    network = simulation.network
    counts, sent = simulation.trace.counts.copy(), network.messages_by_sender.copy()
    bytes_sent, joins = network.bytes_sent, network.connections_made
    receipts.seconds.clear()
    held_trusted: list[int] = []
    held_workers: list[int] = []
    waiting: list[int] = []
    for _ in range(round(MEASURED_SECONDS / SAMPLE_SECONDS)):
        await trio.sleep(SAMPLE_SECONDS)
        held_trusted += _connections(trusted)
        held_workers += _connections(workers)
        waiting.append(len(receipts.waiting))
    happened = simulation.trace.counts - counts
    sent = network.messages_by_sender - sent

    def rate(peers: Sequence[Peer]) -> Spread:
        return spread_of(sent[peer.id] / MEASURED_SECONDS for peer in peers)

    seconds = sorted(receipts.seconds)
    return Scale(
        workers=len(workers),
        admitted_seconds=spread_of(joined),
        connections_trusted=spread_of(held_trusted),
        connections_worker=spread_of(held_workers),
        new_connections=round((network.connections_made - joins) / MEASURED_SECONDS, 2),
        submissions=round(happened["inference.submission_delivered"] / MEASURED_SECONDS, 2),
        verdicts=round(happened["validator.verdict"] / MEASURED_SECONDS, 2),
        waiting=spread_of(waiting),
        receipt_seconds=spread_of(seconds),
        receipt_seconds_p99=round(seconds[int(0.99 * (len(seconds) - 1))], 2),
        messages_worker=rate(workers),
        messages_trusted=rate(trusted),
        bytes_per_peer=round((network.bytes_sent - bytes_sent) / MEASURED_SECONDS / len(sent)),
        leases_lost=happened["membership.lease_lost"],
        violations=[],
    )


def _connections(peers: Sequence[Peer]) -> list[int]:
    return [len(peer.node.transport.connected()) for peer in peers if peer.node is not None]
