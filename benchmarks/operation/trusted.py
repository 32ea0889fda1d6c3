"""Trusted peers of thousands of workers, of which only what trusted peers see is simulated.

Bootstrap peer, trainer and validators are production peers. A worker here is a production lease and
messenger on a simulated line: it is admitted, sends its heartbeats, and twice a minute connects to
a validator, shows it its admission on the piece plane and makes a request, as for a delivery. It
takes no part in the DHT or in gossip, and generates nothing. So 5,000 workers cost minutes. Whole
ones are simulated by `benchmarks.operation.scale`.

    python -m benchmarks.operation.trusted 5000
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import trio

from benchmarks.operation.processes import memory_of
from benchmarks.operation.report import Spread, spread_of
from simnet.disk import SimulatedDisk
from simnet.lines import Weather
from simnet.scenarios import Scenario
from simnet.scenarios.parts import SERVER, draw_line, start_bootstrap
from simnet.scenarios.steady import WORKLOAD
from simnet.simulate import simulate
from simnet.simulation import Peer, Plan, Simulation
from simnet.transport import SimulatedTransport
from simnet.world import SimulatedWorld
from swarm.envelope import Envelope, Gate, seal
from swarm.errors import PeerError, SwarmError
from swarm.events import Event, Events
from swarm.identity import PeerId
from swarm.messages import Heartbeat, Message, PeerRecord
from swarm.messenger import Messenger
from swarm.run.lease import Lease
from swarm.run.run import Run
from swarm.terminal.output import print_json
from swarm.transport import BlobReference, Source
from swarm.world import Sink

WORKERS = 5000
VALIDATORS = 3
JOIN_SECONDS = 60.0
SETTLE_SECONDS = 60.0
"""Time for two deliveries of every worker."""

MEASURED_SECONDS = 90.0
DELIVERY_SECONDS = 30.0
SAMPLE_SECONDS = 5.0


class TrustedScale(msgspec.Struct, frozen=True):
    """Rates are per second of virtual time, in the measured interval."""

    workers: int
    processor_seconds: float
    resident_mib: float
    admitted_seconds: Spread
    """From a worker's start to its first admission."""
    connections_trusted: Spread
    """Of each validator and the trainer, at all samples."""
    new_connections: float
    """Of all peers together, per second."""
    visits: float
    """Connections and requests to validators that succeeded, per second."""
    visits_failed: int
    visit_seconds: Spread
    messages_trusted: Spread
    """Control messages that a trusted peer sends, per second."""
    silent: int
    """Heartbeats that the first trusted peer did not answer."""
    leases_lost: int
    members_known: Spread
    """Live workers that each trusted peer knows at the end."""
    violations: list[str]


class Worker:
    """What trusted peers see of a worker."""

    def __init__(self, simulation: Simulation, number: int, run: Run, trusted: list[Peer]) -> None:
        self.identity = simulation.identity(f"light-{number}")
        self.counts: Counter[str] = Counter()
        self.admitted_seconds: float | None = None
        self.visit_seconds: list[float] = []
        self._simulation = simulation
        self._run = run
        self._trusted = {peer.id: peer for peer in trusted}
        self._world = SimulatedWorld(simulation.seed, f"light-{number}")
        self._line = draw_line(simulation.random)
        self._sequence = 0
        self._transport: SimulatedTransport

    async def live(self, starts_at: float) -> None:
        """Take part until cancelled."""
        await trio.sleep(starts_at)
        began = trio.current_time()
        world = self._world
        events = Events(world, self.identity.peer_id)
        events.add_sink(self._hear)
        run = self._run
        gate = Gate(world, run.id, run.permits, run.trusts, run.clock_off)
        disk = SimulatedDisk(self.identity.peer_id)
        network = self._simulation.network
        async with (
            network.transport(self.identity, world=world, disk=disk, line=self._line) as transport,
            trio.open_nursery() as nursery,
        ):
            self._transport = transport
            messenger = Messenger(transport, gate, events)
            await nursery.start(messenger.run)
            lease = Lease(
                run,
                messenger,
                world,
                events,
                peer_id=self.identity.peer_id,
                seal=self._seal,
                reach=self._reach,
                describe=lambda: Heartbeat(roles=["inference"]),
                granted=lambda admission: transport.set_credential(admission.raw),
            )
            await nursery.start(lease.keep)
            self.admitted_seconds = trio.current_time() - began
            await trio.sleep(world.random.uniform(0, DELIVERY_SECONDS))
            while True:
                await self._visit(messenger)
                await trio.sleep(DELIVERY_SECONDS)

    async def _visit(self, messenger: Messenger) -> None:
        """Go to a validator as for a delivery."""
        began = trio.current_time()
        validator = PeerId(self._world.random.choice(self._run.manifest.validator_ids()))
        request = await self._seal(PeerRecord(roles=["inference"], addresses=[]), 60.0)
        source = Source(validator, self._node_of(validator).transport.bulk_addresses())
        try:
            await self._reach(validator)
            try:  # no such blob, but now the validator knows that this peer is admitted
                await self._transport.fetch(source, BlobReference(bytes(32), 1), cast(Sink, None))
            except PeerError as error:
                if "404" not in str(error):
                    raise
            await messenger.request(validator, request)
        except PeerError:
            self.counts["visit_failed"] += 1
            return
        self.counts["visit"] += 1
        self.visit_seconds.append(trio.current_time() - began)

    def _node_of(self, peer: PeerId) -> Any:
        node = self._trusted[peer].node
        assert node is not None
        return node

    async def _reach(self, peer: PeerId) -> None:
        await self._transport.connect(peer, self._node_of(peer).transport.addresses())

    async def _seal(self, message: Message, lifetime_seconds: float) -> Envelope:
        self._sequence = max(self._sequence + 1, int(self._world.wall_time() * 1000))
        return seal(
            self.identity,
            message,
            run=self._run.id,
            sequence=self._sequence,
            wall_time=self._world.wall_time(),
            lifetime_seconds=lifetime_seconds,
        )

    def _hear(self, event: Event) -> None:
        self.counts[event.name] += 1


def measure() -> TrustedScale:
    return measured(WORKERS)


def measured(workers: int) -> TrustedScale:
    """Simulate the trusted peers of this many workers."""
    found: list[TrustedScale] = []

    async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
        found.append(await _run(simulation, workers))
        return {}

    peers = VALIDATORS + 2
    report = simulate(Scenario("trusted", "", peers, peers, run, Weather(), WORKLOAD))
    if not found:
        raise SwarmError(f"the simulation broke an invariant: {'; '.join(report['violations'])}")
    return msgspec.structs.replace(found[0], violations=report["violations"])


async def _run(simulation: Simulation, count: int) -> TrustedScale:
    names = [f"validator-{number}" for number in range(VALIDATORS)]
    bootstrap = await start_bootstrap(
        simulation, trainers=["trainer"], validators=names, steps=100_000,
        groups_per_step=20 * count,
    )  # fmt: skip
    trusted = [simulation.add(Plan(name, ["validator"], SERVER)) for name in names]
    trusted.append(simulation.add(Plan("trainer", ["trainer"], SERVER)))
    for peer in trusted:
        await peer.start()
    await trio.sleep(10.0)  # until the trusted peers know one another
    run = Run(bootstrap.plan.manifests[0])
    workers = [Worker(simulation, number, run, trusted) for number in range(count)]
    simulation.partial = count
    network = simulation.network
    async with trio.open_nursery() as nursery:
        for worker in workers:
            nursery.start_soon(worker.live, simulation.random.uniform(0, JOIN_SECONDS))
        await _progress(simulation, workers, trusted, JOIN_SECONDS + SETTLE_SECONDS)
        sent, joins = network.messages_by_sender.copy(), network.connections_made
        before = _total(workers)
        for worker in workers:
            worker.visit_seconds.clear()
        held = await _progress(simulation, workers, trusted, MEASURED_SECONDS)
        happened = _total(workers) - before
        rates = network.messages_by_sender - sent
        nursery.cancel_scope.cancel()
    lost = _total(workers)["membership.lease_lost"]
    known = [len(part._trusted.registrar.live_workers()) for part in _parts(trusted)]
    return TrustedScale(
        workers=count,
        processor_seconds=round(time.process_time(), 1),
        resident_mib=round(memory_of(os.getpid()).resident),
        admitted_seconds=spread_of(
            each.admitted_seconds for each in workers if each.admitted_seconds is not None
        ),
        connections_trusted=spread_of(held),
        new_connections=round((network.connections_made - joins) / MEASURED_SECONDS, 2),
        visits=round(happened["visit"] / MEASURED_SECONDS, 2),
        visits_failed=happened["visit_failed"],
        visit_seconds=spread_of(s for worker in workers for s in worker.visit_seconds),
        messages_trusted=spread_of(rates[peer.id] / MEASURED_SECONDS for peer in trusted),
        silent=happened["membership.trusted_silent"],
        leases_lost=lost,
        members_known=spread_of(known),
        violations=[],
    )


def _parts(trusted: Sequence[Peer]) -> list[Any]:
    return [peer.part for peer in trusted if peer.part is not None]


def _total(workers: Sequence[Worker]) -> Counter[str]:
    total: Counter[str] = Counter()
    for worker in workers:
        total.update(worker.counts)
    return total


async def _progress(
    simulation: Simulation, workers: Sequence[Worker], trusted: Sequence[Peer], seconds: float
) -> list[int]:
    """Wait, and print a line now and then; returns the trusted peers' connections, sampled."""
    held: list[int] = []
    for sample in range(round(seconds / SAMPLE_SECONDS)):
        await trio.sleep(SAMPLE_SECONDS)
        now = [len(part.node.transport.connected()) for part in _parts(trusted)]
        held += now
        if sample % 2:
            total = _total(workers)
            line = {
                "virtual_seconds": round(simulation.now()),
                "processor_seconds": round(time.process_time()),
                "admitted": sum(each.admitted_seconds is not None for each in workers),
                "connections": now,
                "made": simulation.network.connections_made,
                "counts": dict(total),
            }
            print(msgspec.json.encode(line).decode(), file=sys.stderr, flush=True)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description="Trusted peers of many workers, in simulation.")
    parser.add_argument("workers", type=int)
    print_json(msgspec.to_builtins(measured(parser.parse_args().workers)))


if __name__ == "__main__":
    main()
