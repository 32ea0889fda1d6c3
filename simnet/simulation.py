"""Simulations of production peers on the simulated seam: start, crash, restart and observe them.

A peer is assembled as by `python -m swarm.peer` from the same settings, with the simulated world,
disk, compute and transport in place of the machine's."""

import dataclasses
import functools
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio
from blake3 import blake3

from simnet.clock import EPOCH, SimulatedWorld, derive, source
from simnet.compute.children import SimulatedCompute
from simnet.compute.setting import (
    PROBE_HASH,
    TOKENIZER_HASH,
    Fabricates,
    Hardware,
    Setting,
    Workload,
)
from simnet.disk import PowerCut, SimulatedDisk
from simnet.lines import Line
from simnet.network import SimulatedNetwork
from swarm.errors import SwarmError, leaf_errors
from swarm.events import Event, Events
from swarm.node.assemble import assemble
from swarm.node.node import Node
from swarm.node.run_node import RunNode
from swarm.roles import Role, load_role, take_part
from swarm.run.manifest import MANIFEST_LIFETIME_SECONDS, run_id
from swarm.settings import BOOTSTRAP, PeerSettings
from swarm.wire import manifest as terms
from swarm.wire.envelope import Envelope, remembering_envelopes, seal
from swarm.wire.identity import Identity, PeerId

ENVELOPES_REMEMBERED = 16_384
"""Envelopes whose signature check all peers of a simulation share. The key is the envelope's bytes,
so that a forged envelope is still refused."""


SUPERVISOR_SECONDS = 5.0
"""Time after which a peer that ended by itself is started again."""

STATUS_SECONDS = 30.0
"""Time between `peer.status` events while nothing changes; long, since no person reads them and
there may be a thousand peers."""

SIMULATED = terms.EnvironmentReference(name="simulated", version="1", probe_hash=PROBE_HASH)

DISK_BYTES = 1 << 44

LAST_EVENTS = 50
"""Number of each peer's last events kept, to show the causes of a violation."""

REPETITIVE = ("peer.status", "shardcast.piece_received", "dht.lookup_finished", "dht.contact_")
"""Prefixes of event names that are not kept."""


@dataclass
class Plan:
    """The description of a peer: its name, roles, line and machine."""

    name: str
    roles: list[str]
    line: Line = field(default_factory=Line)
    hardware: Hardware = field(default_factory=Hardware)
    skew_seconds: float = 0.0
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tables of its settings. A trainer's names the simulated model."""
    manifests: list[Envelope] = field(default_factory=list)
    acts: type[Role] | None = None
    """The role class that an adversary really runs."""
    fabricates: Fabricates = ""
    """What an adversary's children fabricate: `simnet.compute.setting.Setting.fabricates`."""


class Trace:
    """A hash of all events of a simulation: two runs with equal hashes did the same."""

    def __init__(self) -> None:
        self._hasher = blake3()
        self.counts: Counter[str] = Counter()
        self._last: dict[str, deque[tuple[float, str, str, dict[str, Any]]]] = {}

    def add(self, time: float, name: str, peer: str, fields: dict[str, Any]) -> None:
        entry = (time, name, peer, fields)
        self._hasher.update(msgspec.msgpack.encode(entry))
        self.counts[name] += 1
        if not name.startswith(REPETITIVE):
            if peer not in self._last:
                self._last[peer] = deque(maxlen=LAST_EVENTS)
            self._last[peer].append(entry)

    def last(self, peers: Sequence[str] = ()) -> list[tuple[float, str, str, dict[str, Any]]]:
        """(time, event, peer, fields) of the last events of these peers, or of all, in order."""
        found = [entry for peer in peers or self._last for entry in self._last.get(peer, ())]
        return sorted(found, key=lambda entry: entry[0])[-LAST_EVENTS:]

    @property
    def events(self) -> int:
        return self.counts.total()

    def digest(self) -> str:
        return self._hasher.hexdigest()


class Expectation:
    """An event expected of each of some peers, and when each first emitted it (virtual seconds)."""

    def __init__(self, what: str, peers: Iterable[str], matches: Callable[[Event], bool]) -> None:
        self.what = what
        self.times: dict[str, float] = {}
        self._matches = matches
        self._missing = dict.fromkeys(peers)
        self._met = trio.Event()
        if not self._missing:
            self._met.set()

    def hear(self, name: str, event: Event) -> None:
        if name in self._missing and self._matches(event):
            del self._missing[name]
            self.times[name] = trio.current_time()
            if not self._missing:
                self._met.set()

    def missing(self) -> list[str]:
        return list(self._missing)

    async def wait(self) -> None:
        await self._met.wait()


class Peer:
    """A production peer in the simulation, across all its processes."""

    def __init__(self, simulation: "Simulation", plan: Plan) -> None:
        self.plan = plan
        self.name = plan.name
        self.identity = Identity(derive(simulation.seed, "key", plan.name))
        self.disk = SimulatedDisk(plan.name, capacity_bytes=DISK_BYTES)
        self.node: Node | None = None
        """The running node; None while the peer is down."""
        self.ended: str | None = None
        """Why its last process ended by itself."""
        self.roles: list[Role] = []
        """The roles of its process, once they run."""
        self.left = False
        """Whether the peer has left for good."""
        self._simulation = simulation
        self._lives = 0
        self._scope: trio.CancelScope | None = None
        self._world: SimulatedWorld | None = None
        self._part: RunNode | None = None
        self._over = trio.Event()
        self._struck = False
        """Whether a fault ended its present process, possibly before it began to listen."""

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def part(self) -> RunNode | None:
        """Its part in the run; None while the peer is down or has not joined."""
        return self._part if self.node is not None else None

    def evicted(self) -> list[str]:
        """Names of the peers that this peer knows as evicted; none while it is down."""
        part = self.part
        return [
            other.name
            for other in self._simulation.peers.values()
            if part is not None and part.run.evicted(other.id) is not None
        ]

    @property
    def alive(self) -> bool:
        return self._scope is not None

    async def start(self, *, resume: bool = False) -> Node:
        """Start a process; return once the peer listens."""
        if self.alive:
            raise ValueError(f"{self.name} is alive already")
        self._over = trio.Event()
        self.ended = None
        self._struck = False
        scope = self._scope = trio.CancelScope()
        node: Node = await self._simulation.nursery.start(self._live, scope, resume, name=self.name)
        return node

    async def start_again(self) -> None:
        """Start a new process if the peer is down and has not left; it may end at once."""
        if not self.alive and not self.left:
            try:
                await self.start(resume=True)
            except RuntimeError:
                if self.ended is None and not self._struck:
                    raise

    def successor(self) -> Plan:
        name, _, generation = self.name.partition("~")
        return dataclasses.replace(self.plan, name=f"{name}~{int(generation or 1) + 1}")

    def step_clock(self, ahead_seconds: float) -> None:
        """Move its wall clock forward, for this process and all later ones."""
        self.plan = dataclasses.replace(
            self.plan, skew_seconds=self.plan.skew_seconds + ahead_seconds
        )
        if self._world is not None:
            self._world.correct_clock(ahead_seconds)

    async def crash(self) -> None:
        """Lose power, without any clean-up; return when its tasks have ended."""
        simulation = self._simulation
        self.disk.lose_power()
        simulation.network.cut_power(self.id)
        await self._end()
        self.disk.recover(source(simulation.seed, "power cut", self.name, str(self._lives)))

    async def kill(self) -> None:
        """Kill the process but not the machine: all written data survives."""
        self.disk.lose_power()  # no clean-up runs, as after SIGKILL
        self._simulation.network.kill(self.id)
        await self._end()
        self.disk.come_back()

    async def _end(self) -> None:
        assert self._scope is not None
        scope, self._scope = self._scope, None  # from now on its events are ignored
        self._struck = True
        scope.cancel()
        await self._over.wait()

    async def _live(
        self, scope: trio.CancelScope, resume: bool, *, task_status: trio.TaskStatus[Node]
    ) -> None:
        simulation, plan = self._simulation, self.plan
        self._lives += 1
        world = self._world = SimulatedWorld(
            simulation.seed, f"{self.name} {self._lives}", skew_seconds=plan.skew_seconds
        )
        events = Events(world, self.id)
        events.add_sink(lambda event: simulation.hear(self, scope, event))
        honest = [simulation.role(name) for name in plan.roles if name != BOOTSTRAP]
        roles = honest if plan.acts is None else [plan.acts]
        self.roles = []
        try:
            with scope:
                async with (
                    simulation.network.transport(
                        self.identity,
                        world=world,
                        disk=self.disk,
                        line=plan.line,
                        relay="relay" in plan.roles,
                    ) as transport,
                    assemble(
                        self.identity,
                        world=world,
                        disk=self.disk,
                        compute=self._compute(scope),
                        transport=transport,
                        events=events,
                        settings=self._settings(resume),
                        manifests={run_id(manifest): manifest for manifest in plan.manifests},
                    ) as node,
                ):
                    self.node = node
                    task_status.started(node)
                    await take_part(node, [_shown(role, self) for role in roles])
        except* PowerCut:
            pass
        except* SwarmError as group:
            self.ended = "; ".join(str(error) for error in leaf_errors(group))
            simulation.nursery.start_soon(simulation.on_end, self, name=f"supervisor {self.name}")
        finally:
            self.node = self._world = self._part = None
            if self._scope is scope:
                self._scope = None
            self._over.set()

    def _settings(self, resume: bool) -> PeerSettings:
        tables = dict(self.plan.tables)
        for role in ("trainer", "replica"):
            if role in self.plan.roles:
                tables[role] = {"model": "simulated", **tables.get(role, {})}
        return PeerSettings(
            role=self.plan.roles,
            bootstrap=[each for each in self._simulation.bootstrap if not each.endswith(self.id)],
            home=f"/simulated/{self.name}",
            resume=resume,
            status_seconds=STATUS_SECONDS,
            tables=tables,
        )

    def _compute(self, scope: trio.CancelScope) -> SimulatedCompute:
        tell = functools.partial(self._simulation.tell, self, scope)
        plan, workload = self.plan, self._simulation.workload
        return SimulatedCompute(Setting(self.disk, plan.hardware, workload, tell, plan.fabricates))


class Simulation:
    """Peers, their network and their events. Use it inside `async with simulation.running():`."""

    def __init__(self, seed: int, *, workload: Workload | None = None) -> None:
        self.seed = seed
        self.random = source(seed, "scenario")
        self.network = SimulatedNetwork(seed)
        self.workload = workload or Workload()
        self.peers: dict[str, Peer] = {}
        self.bootstrap: list[str] = []
        self.trace = Trace()
        self.violations: list[str] = []
        self.led_there: list[tuple[float, str, str, dict[str, Any]]] = []
        """The last events, (time, event, peer, fields), of the peers that the first violation
        names, or of all peers if it names none."""
        self.faults: list[Any] | None = None
        """The fault schedule, where the scenario does not draw one."""
        self.disturbed = 0
        """Number of faults in progress."""
        self.witnesses: list[Callable[[Peer, str, dict[str, Any]], None]] = []
        """Called with the true actions of a peer's children."""
        self.listeners: list[Callable[[float, Peer, Event], None]] = []
        """Called with the virtual time, the peer and each of its events. They change nothing."""
        self.nursery: trio.Nursery
        self._expectations: list[Expectation] = []
        self._roles: dict[str, type[Role]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            with remembering_envelopes(ENVELOPES_REMEMBERED):
                async with self.network.running(), trio.open_nursery() as nursery:
                    self.nursery = nursery
                    yield
                    nursery.cancel_scope.cancel()
        finally:
            for peer in self.peers.values():
                peer.disk.close()

    @staticmethod
    def now() -> float:
        return trio.current_time()

    def add(self, plan: Plan) -> Peer:
        if plan.name in self.peers:
            raise ValueError(f"there is a peer named {plan.name} already")
        peer = self.peers[plan.name] = Peer(self, plan)
        return peer

    def identity(self, name: str) -> Identity:
        """The key of the peer of this name, whether it exists yet or not."""
        return Identity(derive(self.seed, "key", name))

    def manifest(
        self,
        *,
        trainers: Sequence[str],
        validators: Sequence[str],
        steps: int = 1000,
        groups_per_step: int = 32,
        max_new_tokens: int = 4096,
        group_size: int = 8,
        groups_per_submission: int = 4,
        swaps_max: int = 0,
        environment_peers: Sequence[str] = (),
        standbys: Sequence[str] = (),
        **others: Any,
    ) -> Envelope:
        """A signed run manifest that names these peers; `others` are further fields of it."""
        owner = self.identity("owner")

        def keys(names: Sequence[str]) -> list[terms.TrustedKey]:
            return [terms.TrustedKey(peer=self.identity(name).peer_id) for name in names]

        fields: dict[str, Any] = {
            "environments": [SIMULATED],
            "admissions": terms.Admissions(unproven_max=100_000, helpers_max=100_000),
            "thresholds": terms.Thresholds(measured_tokens=1),
            **{name: value for name, value in others.items() if value is not None},
        }
        message = terms.RunManifest(
            name="simulated",
            version=1,
            model="simulated",
            tokenizer_hash=TOKENIZER_HASH,
            sampling=terms.Sampling(
                temperature=1.0,
                max_new_tokens=max_new_tokens,
                stop_ids=[0],
                group_size=group_size,
                groups_per_submission=groups_per_submission,
                swaps_max=swaps_max,
            ),
            schedule=terms.Schedule(steps=steps, groups_per_step=groups_per_step),
            trainers=keys(trainers),
            validators=keys(validators),
            environment_peers=keys(environment_peers),
            standbys=keys(standbys),
            **fields,
        )
        return seal(
            owner,
            message,
            run=f"{owner.peer_id}/{message.name}",
            sequence=1,
            wall_time=EPOCH,
            lifetime_seconds=MANIFEST_LIFETIME_SECONDS,
        )

    def role(self, name: str) -> type[Role]:
        if name not in self._roles:
            self._roles[name] = load_role(name)
        return self._roles[name]

    def evictions(self) -> int:
        """Number of peers evicted from the run, as its trusted peers know."""
        return len({name for peer in self.peers.values() for name in peer.evicted()})

    async def on_end(self, peer: Peer) -> None:
        """Restart, like a supervisor, a process that ended with an error: only faults allow it."""
        if peer.plan.acts is not None:
            return  # most likely it was caught
        if not self.disturbed:
            self.violate(f"{peer.name} ended: {peer.ended}")
            return
        await trio.sleep(SUPERVISOR_SECONDS)
        await peer.start_again()

    # --- what peers say ---

    def tell(self, peer: Peer, life: trio.CancelScope, what: str, **facts: Any) -> None:
        """Record a true action of a peer's child; a crashed peer's are ignored."""
        if peer._scope is life:
            for witness in self.witnesses:
                witness(peer, what, facts)

    def hear(self, peer: Peer, life: trio.CancelScope, event: Event) -> None:
        """Add an event to the trace; a crashed peer's events are ignored."""
        if peer._scope is not life:
            return
        now = trio.current_time()
        self.trace.add(now, event.name, peer.name, event.fields)
        for listener in self.listeners:
            listener(now, peer, event)
        for expectation in self._expectations:
            expectation.hear(peer.name, event)

    def expect(
        self,
        event: str,
        peers: Iterable[str],
        matches: Callable[[Event], bool] = lambda event: True,
    ) -> Expectation:
        """Listen, from now on, for each of these peers to emit this event."""
        expectation = Expectation(
            event, peers, lambda heard: heard.name == event and matches(heard)
        )
        self._expectations.append(expectation)
        return expectation

    async def meet(self, expectation: Expectation, seconds: float) -> bool:
        """Wait until an expectation is met; a violation of liveness if that takes too long."""
        with trio.move_on_after(seconds):
            await expectation.wait()
        self._expectations.remove(expectation)
        missing = expectation.missing()
        if missing:
            names = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
            self.violate(
                f"{len(missing)} peers ({names}) did not come to {expectation.what} "
                f"within {seconds:g} s"
            )
        return not missing

    def violate(self, what: str) -> None:
        """Record a violation, and stop the simulation: later events prove nothing."""
        if not self.violations:
            named = [name for name in re.findall(r"[\w~-]+", what) if name in self.peers]
            self.led_there = self.trace.last(list(dict.fromkeys(named)))
            self.nursery.cancel_scope.cancel()
        self.violations.append(f"at {trio.current_time():.3f} s: {what}")


def _shown(role: type[Role], peer: Peer) -> type[Role]:
    """Wrap a role class so that the simulation sees each role that is made."""

    def show(self: Any, part: RunNode) -> None:
        peer.roles.append(self)
        peer._part = part
        role.__init__(self, part)

    return type(role.__name__, (role,), {"__init__": show})
