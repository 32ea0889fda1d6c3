"""A run of several peers in one process, in virtual time: gate, gossip, messenger, membership."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar, cast

import trio
import trio.testing

from swarm.data import statements
from swarm.errors import PeerError
from swarm.events import Event, Events
from swarm.gossip.gossip import Gossip
from swarm.gossip.topics import RUN, WORK
from swarm.ledger import derived
from swarm.ledger.entries import Entry, Redeemed
from swarm.ledger.redeemed_invites import derive
from swarm.run.clock import TrustedClock
from swarm.run.invites import Invites
from swarm.run.lease import LeaseKeeper
from swarm.run.participant import Participant
from swarm.run.registrar import Registrar
from swarm.run.run import Run
from swarm.wire.envelope import Envelope, Gate, seal
from swarm.wire.identity import Identity, PeerId
from swarm.wire.manifest import (
    Admissions,
    EnvironmentReference,
    RunManifest,
    Sampling,
    Schedule,
    TrustedKey,
)
from swarm.wire.manifest import Objective as ObjectiveNumbers
from swarm.wire.messages import Heartbeat, Message, Presence
from swarm.wire.messenger import Messenger
from swarm.world import Disk
from tests.memory_network import MemoryNetwork
from tests.worlds import WALL, VirtualWorld

T = TypeVar("T")


def identity(number: int) -> Identity:
    return Identity(number.to_bytes(32, "big"))


def manifest(
    trainers: Sequence[Identity],
    validators: Sequence[Identity],
    *,
    version: int = 1,
    admissions: Admissions | None = None,
) -> RunManifest:
    return RunManifest(
        name="test",
        version=version,
        model="tiny",
        tokenizer_hash=bytes(32),
        environments=[EnvironmentReference(name="sort-digits", version="1")],
        sampling=Sampling(
            temperature=1.0, max_new_tokens=8, stop_ids=[2], group_size=8, groups_per_submission=4
        ),
        schedule=Schedule(steps=10, groups_per_step=32),
        objective=ObjectiveNumbers(),
        trainers=[TrustedKey(peer=key.peer_id) for key in trainers],
        validators=[TrustedKey(peer=key.peer_id) for key in validators],
        admissions=admissions or Admissions(),
    )


def sealed(
    key: Identity,
    message: Message,
    run: str,
    *,
    at: float = 0.0,
    sequence: int = 1,
    lifetime_seconds: float = 600.0,
) -> Envelope:
    return seal(
        key,
        message,
        run=run,
        sequence=sequence,
        wall_time=WALL + at,
        lifetime_seconds=lifetime_seconds,
    )


def sealed_manifest(owner: Identity, message: RunManifest) -> Envelope:
    return sealed(owner, message, f"{owner.peer_id}/{message.name}", lifetime_seconds=1e6)


class Database:
    """A database in memory."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")
        for statement in statements(derived.__file__):
            self.connection.execute(statement)

    def read(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self.connection.execute(query, parameters).fetchall()


class Member:
    """One peer of a test run."""

    def __init__(
        self, network: TestRun, key: Identity, transport: Any, topics: Sequence[str], seed: int
    ) -> None:
        self.key = key
        self.world = VirtualWorld(seed)
        self.events = Events(self.world, key.peer_id)
        self.seen: list[Event] = []
        self.events.add_sink(self.seen.append)
        self.run = Run(network.manifest)
        self.transport = transport
        self.gate = Gate(
            self.world, self.run.id, self.run.permits, self.run.trusts, self.run.clock_off
        )
        clock = TrustedClock(self.run, self.world, self.events, key.peer_id)
        self.gossip = Gossip(
            transport,
            self.gate,
            self.events,
            topics,
            records=lambda most: [],
            learn_record=lambda _: None,
            admits=lambda peer, _: network.admits(peer),
        )
        self.gossip.compare_clock = clock.compare
        self.gossip.listen(Presence, clock.on_presence)
        self.messenger = Messenger(transport, self.gate, self.events)
        self.roles = ["inference"]
        self.leaving: Literal["", "left", "finished"] = ""
        self.granted: list[Envelope] = []
        self.stakes: Counter[str] = Counter()
        """Submissions by worker."""
        self.has_work = True
        database: Any = Database()

        async def log(entries: list[Entry]) -> None:
            for entry in entries:
                assert isinstance(entry, Redeemed)
                derive(database.connection, entry, self.run.owners, self.run.id)

        self.invites = Invites(database, self.world, self.events, log)
        self.networks: dict[str, str] = {}
        """The /24 of peers, where it is bounded."""
        self._sequence = 0
        self._network = network

    @property
    def id(self) -> PeerId:
        return self.key.peer_id

    async def seal(self, message: Message, lifetime_seconds: float) -> Envelope:
        self._sequence = max(self._sequence + 1, int(self.world.wall_time() * 1000))
        return seal(
            self.key,
            message,
            run=self.run.id,
            sequence=self._sequence,
            wall_time=self.world.wall_time(),
            lifetime_seconds=lifetime_seconds,
        )

    async def announce(self, message: Message, lifetime_seconds: float = 600.0) -> Envelope:
        envelope = await self.seal(message, lifetime_seconds)
        self.gossip.publish(envelope)
        return envelope

    def describe(self) -> Heartbeat:
        return Heartbeat(roles=self.roles, leaving=self.leaving)

    async def reach(self, peer: PeerId) -> None:
        if peer not in self.transport.connected():
            address = self._network.addresses.get(peer)
            if address is None:
                raise PeerError(f"no address of {peer}")
            await self.transport.connect(peer, address)

    def lease(self) -> LeaseKeeper:
        return LeaseKeeper(self._me(), reach=self.reach, granted=self.granted.append)

    def _me(self) -> Participant:
        return Participant(
            self.id,
            self.run,
            self.world,
            self.events,
            self.gossip,
            self.messenger,
            self.seal,
            self.describe,
        )

    def registrar(self) -> Registrar:
        return Registrar(
            self._me(),
            stake=self.stakes.__getitem__,
            invites=self.invites,
            secret=self.key.sign(b"entry"),
            has_work=lambda: self.has_work,
            network_of=lambda peer: self.networks.get(peer, ""),
        )

    def names(self) -> list[str]:
        return [event.name for event in self.seen]

    def told(self, name: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.seen if event.name == name]


class TestRun:
    """A memory network with one run; members are added as a test goes."""

    __test__ = False

    def __init__(self, envelope: Envelope, nursery: trio.Nursery) -> None:
        self.manifest = envelope
        self.network = MemoryNetwork(latency_seconds=0.01)
        self.addresses: dict[PeerId, Sequence[str]] = {}
        self.strangers: set[PeerId] = set()
        """Peers that have no admission to show to their neighbours."""
        self.nursery = nursery
        self._count = 0

    async def add(
        self,
        key: Identity,
        topics: Sequence[str] = (RUN, WORK),
        *,
        speaks: bool = True,
        host: str | None = None,
    ) -> Member:
        """`speaks`: whether it begins to gossip at once; else `speak` is to be called."""
        self._count += 1
        world = VirtualWorld(self._count)
        transport = await self.nursery.start(self._hold, key, world, host)
        member = Member(self, key, transport, topics, self._count)
        self.addresses[key.peer_id] = transport.addresses()
        await self.nursery.start(member.messenger.run)
        if speaks:
            await self.speak(member)
        return member

    def admits(self, peer: PeerId) -> bool:
        return peer not in self.strangers

    async def speak(self, member: Member) -> None:
        await self.nursery.start(member.gossip.run)

    async def _hold(
        self,
        key: Identity,
        world: VirtualWorld,
        host: str | None,
        task_status: trio.TaskStatus[Any],
    ) -> None:
        async with self.network.transport(
            key, world=world, disk=cast(Disk, None), host=host
        ) as transport:
            task_status.started(transport)
            await trio.sleep_forever()


@asynccontextmanager
async def running(envelope: Envelope) -> AsyncIterator[TestRun]:
    async with trio.open_nursery() as nursery:
        yield TestRun(envelope, nursery)
        nursery.cancel_scope.cancel()


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
