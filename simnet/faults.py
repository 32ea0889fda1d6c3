"""Faults of machines and lines, in schedules drawn from a seed or written by hand.

A schedule is a list of faults; docs/simulation.md shows them in a scenario's file. Every lasting
fault ends by itself after `seconds`; then the run must recover."""

from collections.abc import Sequence
from random import Random
from typing import Annotated, TypeAlias, get_args

import msgspec
import trio
from msgspec import Meta

from simnet.compute.children import SimulatedCompute
from simnet.simulation import Peer, Simulation
from swarm.errors import UserError
from swarm.gossip.topics import PROTOCOL as GOSSIP_PROTOCOL

AFTERMATH_SECONDS = 60.0
"""Time after a fault during which a peer may still end because of it; it is started again."""

Seconds = Annotated[float, Meta(ge=0, lt=1e9)]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault that hits each of `peers` (by name) at `at` (virtual seconds)."""

    at: Seconds
    peers: list[str]

    async def happen(self, simulation: Simulation) -> None:
        """Cause the fault now; return once it is over."""
        raise NotImplementedError


class Lasting(Fault, frozen=True, kw_only=True):
    """A fault that ends after `seconds`."""

    seconds: Annotated[float, Meta(gt=0, lt=1e9)]

    async def happen(self, simulation: Simulation) -> None:
        peers = [simulation.peers[name] for name in self.peers]
        for peer in peers:
            await self.begin(simulation, peer)
        await trio.sleep(self.seconds)
        for peer in peers:
            await self.end(simulation, peer)

    async def begin(self, simulation: Simulation, peer: Peer) -> None:
        raise NotImplementedError

    async def end(self, simulation: Simulation, peer: Peer) -> None:
        raise NotImplementedError


class Crash(Lasting, frozen=True, kw_only=True, tag_field="kind", tag="crash"):
    """A peer loses power for a while, then starts again from the data that its disk kept."""

    async def begin(self, simulation: Simulation, peer: Peer) -> None:
        if peer.alive:
            await peer.crash()

    async def end(self, simulation: Simulation, peer: Peer) -> None:
        await peer.start_again()


class Kill(Crash, frozen=True, kw_only=True, tag_field="kind", tag="kill"):
    """A peer's process dies and is started again; its machine and all written data survive."""

    async def begin(self, simulation: Simulation, peer: Peer) -> None:
        if peer.alive:
            await peer.kill()


class Replace(Fault, frozen=True, kw_only=True, tag_field="kind", tag="replace"):
    """A peer leaves for good without notice, and a new peer of its kind joins: churn."""

    async def happen(self, simulation: Simulation) -> None:
        for name in self.peers:
            peer = simulation.peers[name]
            if peer.alive:
                await peer.crash()
                peer.left = True
                await simulation.add(peer.successor()).start()


class KillChild(Fault, frozen=True, kw_only=True, tag_field="kind", tag="kill-child"):
    """One of a peer's compute children dies; `lot` (0 to below 1) selects it."""

    lot: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    async def happen(self, simulation: Simulation) -> None:
        await trio.lowlevel.checkpoint()
        for name in self.peers:
            node = simulation.peers[name].node
            if node is None:
                continue
            assert isinstance(node.compute, SimulatedCompute)
            children = node.compute.children
            if children:
                children[sorted(children)[int(self.lot * len(children))]].die()


class Freeze(Lasting, frozen=True, kw_only=True, tag_field="kind", tag="freeze"):
    """No message reaches a peer or leaves it, and its disk and children do not answer. Its timers
    keep running, so that afterwards it finds its deadlines passed."""

    async def begin(self, simulation: Simulation, peer: Peer) -> None:
        simulation.network.freeze(peer.id)
        peer.disk.hold()

    async def end(self, simulation: Simulation, peer: Peer) -> None:
        simulation.network.thaw(peer.id)
        peer.disk.go_on()


class SlowDisk(Lasting, frozen=True, kw_only=True, tag_field="kind", tag="slow-disk"):
    """Every operation on the disk takes `factor` times as long."""

    factor: Annotated[float, Meta(ge=1, le=1e6)] = 100.0

    async def begin(self, simulation: Simulation, peer: Peer) -> None:
        peer.disk.slow_down(self.factor)

    async def end(self, simulation: Simulation, peer: Peer) -> None:
        peer.disk.slow_down(1 / self.factor)


class FullDisk(Lasting, frozen=True, kw_only=True, tag_field="kind", tag="full-disk"):
    """The disk accepts no further byte."""

    async def begin(self, simulation: Simulation, peer: Peer) -> None:
        peer.disk.fill()

    async def end(self, simulation: Simulation, peer: Peer) -> None:
        peer.disk.make_room()


class Partition(Lasting, frozen=True, kw_only=True, tag_field="kind", tag="partition"):
    """No message passes between `peers` and all others; with `one_way`, none from `peers`."""

    one_way: bool = False

    async def happen(self, simulation: Simulation) -> None:
        inside = [simulation.peers[name].id for name in self.peers]
        outside = [peer.id for name, peer in simulation.peers.items() if name not in self.peers]
        pairs = [(a, b) for a in inside for b in outside]
        for a, b in pairs:
            simulation.network.cut(a, b, one_way=self.one_way)
        await trio.sleep(self.seconds)
        for a, b in pairs:
            simulation.network.heal(a, b, one_way=self.one_way)


class Lossy(Lasting, frozen=True, kw_only=True, tag_field="kind", tag="lossy"):
    """An additional share of a peer's packets is lost, in each direction."""

    loss: Annotated[float, Meta(gt=0, lt=1)] = 0.2

    async def begin(self, simulation: Simulation, peer: Peer) -> None:
        simulation.network.lose(peer.id, self.loss)

    async def end(self, simulation: Simulation, peer: Peer) -> None:
        simulation.network.lose(peer.id, -self.loss)


class Duplicate(Lasting, frozen=True, kw_only=True, tag_field="kind", tag="duplicate"):
    """Every gossip frame to a peer arrives twice. TCP hides duplicated packets, but an announcement
    can arrive again over another connection."""

    async def begin(self, simulation: Simulation, peer: Peer) -> None:
        simulation.network.duplicate(peer.id, GOSSIP_PROTOCOL, 1)

    async def end(self, simulation: Simulation, peer: Peer) -> None:
        simulation.network.duplicate(peer.id, GOSSIP_PROTOCOL, -1)


class ClockStep(Fault, frozen=True, kw_only=True, tag_field="kind", tag="clock-step"):
    """A peer's wall clock jumps by `ahead_seconds`, and stays off."""

    ahead_seconds: Annotated[float, Meta(gt=-1e9, lt=1e9)]

    async def happen(self, simulation: Simulation) -> None:
        await trio.lowlevel.checkpoint()
        for name in self.peers:
            simulation.peers[name].step_clock(self.ahead_seconds)


AnyFault: TypeAlias = (
    Crash
    | Kill
    | KillChild
    | Replace
    | Freeze
    | SlowDisk
    | FullDisk
    | Partition
    | Lossy
    | Duplicate
    | ClockStep
)
Schedule: TypeAlias = list[AnyFault]


KINDS = tuple(str(kind.__struct_config__.tag) for kind in get_args(AnyFault))


def kind_of(fault: Fault) -> str:
    return str(fault.__struct_config__.tag)


# --- schedules ---


async def befall(simulation: Simulation, schedule: Sequence[AnyFault]) -> None:
    """Cause every fault at its time; return when the last one is over."""

    async def happen(fault: AnyFault) -> None:
        simulation.disturbed += 1
        await fault.happen(simulation)
        simulation.nursery.start_soon(calm_down, name="aftermath")

    async def calm_down() -> None:
        await trio.sleep(AFTERMATH_SECONDS)
        simulation.disturbed -= 1

    async with trio.open_nursery() as nursery:
        for number, fault in enumerate(sorted(schedule, key=lambda fault: fault.at)):
            await trio.sleep_until(fault.at)
            nursery.start_soon(happen, fault, name=f"fault {number}")


def draw(
    chance: Random,
    names: Sequence[str],
    *,
    start: float,
    end: float,
    count: int,
    kinds: Sequence[str] = (),
) -> Schedule:
    """Draw `count` faults of these kinds (all, if none are given) that hit these peers between
    `start` and `end`. Raises `UserError` for an unknown kind."""
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"{kind!r} is none of {', '.join(KINDS)}")
    replaceable = [name for name in names if name.startswith("worker")]
    schedule: Schedule = []
    for _ in range(count):
        at = round(chance.uniform(start, end), 3)
        seconds = round(min(end - at, chance.choice([1.0, 5.0, 15.0, 40.0])) + 1.0, 3)
        one = [chance.choice(names)]
        few = sorted(chance.sample(names, min(len(names), chance.randint(1, 3))))
        choices: list[AnyFault] = [
            Crash(at=at, seconds=seconds, peers=few),
            Kill(at=at, seconds=seconds, peers=few),
            KillChild(at=at, peers=few, lot=chance.randrange(1000) / 1000),
            Freeze(at=at, seconds=seconds, peers=one),
            SlowDisk(at=at, seconds=seconds, peers=one),
            FullDisk(at=at, seconds=seconds, peers=one),
            Partition(at=at, seconds=seconds, peers=few),
            Partition(at=at, seconds=seconds, peers=few, one_way=True),
            Lossy(at=at, seconds=seconds, peers=few),
            Duplicate(at=at, seconds=seconds, peers=few),
            ClockStep(at=at, peers=one, ahead_seconds=round(chance.uniform(-20, 20), 3)),
            *([Replace(at=at, peers=[chance.choice(replaceable)])] if replaceable else []),
        ]
        if kinds:
            choices = [fault for fault in choices if kind_of(fault) in kinds]
        if choices:
            schedule.append(chance.choice(choices))
    return sorted(schedule, key=lambda fault: fault.at)


def check(schedule: Sequence[AnyFault], names: Sequence[str]) -> None:
    """Raise `UserError` for a fault that hits another peer than these."""
    for fault in schedule:
        for name in fault.peers:
            if name not in names:
                raise UserError(f"{kind_of(fault)}: there is no peer named {name!r}")
