"""The child processes of an environment peer, and the turns that it has signed.

Each child plays one call at a time; one that hangs, crashes or takes much memory ends it alone."""

import sqlite3
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pydantic
import trio

from peers.sandbox import SandboxError
from swarm.data import statements
from swarm.errors import SwarmError
from swarm.jobs.environment import EnvironmentService, EnvironmentSetup
from swarm.node.node import Node
from swarm.settings import RoleSettings
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.turns import Turn
from swarm.world import ChildDied, ChildError, Disk, client, execute, is_childs
from swarm.world.restarts import Restarts

_COLUMNS = "seed, grp, sample, idx, before"

WORKER_SHARE = 1 / 8
"""Part of the space that the turns of one worker may take, and ..."""
NETWORK_SHARE = 1 / 2
"""... those of all workers of one network (/24, IPv6: /48)."""


class Asker(NamedTuple):
    """Whose space a turn takes."""

    worker: str
    network: str


Key = tuple[bytes, int, int, int, bytes]
"""What a turn answers."""


def key_of(turn: Turn) -> Key:
    return (turn.seed, turn.group, turn.sample, turn.index, turn.before)


class SignedTurns:
    """Turns by what they answer, on disk for as long as their step can be trained on.

    A repeated request gets the same turn, also after a restart. Otherwise a worker could ask an
    environment that is not deterministic again, until it likes the answer."""

    def __init__(self, disk: Disk, bytes_max: int) -> None:
        self._database = disk.database("turns.sqlite")
        self._bytes_max = bytes_max
        self._turn = trio.Lock()
        self._unstored: dict[Key, tuple[int, int, bytes, str, str]] = {}
        self._used: Counter[tuple[str, str]] = Counter()
        """Bytes in all (`""`), and of each worker and network."""

    async def open(self) -> None:
        await execute(self._database, *statements(__file__))
        self._count()

    def has_room(self, asker: Asker) -> bool:
        return (
            self._used["", ""] < self._bytes_max
            and self._used["worker", asker.worker] < WORKER_SHARE * self._bytes_max
            and self._used["network", asker.network] < NETWORK_SHARE * self._bytes_max
        )

    def _charge(self, asker: Asker, size_bytes: int) -> None:
        for key in (("", ""), ("worker", asker.worker), ("network", asker.network)):
            self._used[key] += size_bytes

    def _count(self) -> None:
        self._used.clear()
        for worker, network, size_bytes in self._database.read(
            "SELECT worker, network, SUM(LENGTH(envelope)) FROM turns GROUP BY worker, network"
            " ORDER BY worker, network"
        ):
            self._charge(Asker(worker, network), size_bytes)

    def close(self) -> None:
        self._database.close()

    def find(self, turn: Turn) -> Envelope | None:
        """The turn that was signed before in the place of `turn`."""
        found = self._database.read(
            f"SELECT envelope FROM turns WHERE ({_COLUMNS}) = (?, ?, ?, ?, ?) ORDER BY {_COLUMNS}",
            key_of(turn),
        )
        try:
            return open_envelope(found[0][0]) if found else None
        except Dropped:  # another version of Swarm wrote it
            return None

    async def keep(
        self, signed: Envelope, at: tuple[int, int], oldest: tuple[int, int], asker: Asker
    ) -> Envelope:
        """Store a turn unless one was stored meanwhile; returns the one that counts, once durable.

        `at`: lineage and step of its submission; turns of those before `oldest` are deleted."""
        turn = signed.expect(Turn)
        key = key_of(turn)
        if key not in self._unstored:
            self._unstored[key] = (*at, signed.raw, *asker)
            self._charge(asker, len(signed.raw))
        async with self._turn:
            rows = dict(self._unstored)
            if key in rows:  # else the task before has stored it together with its own

                def store(connection: sqlite3.Connection) -> int:
                    connection.executemany(
                        f"INSERT OR IGNORE INTO turns ({_COLUMNS}, lineage, step, envelope, worker,"
                        " network) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        [(*each, *values) for each, values in rows.items()],
                    )
                    return connection.execute(
                        "DELETE FROM turns WHERE (lineage, step) < (?, ?)", oldest
                    ).rowcount

                deleted = await self._database.transact(store)
                for each in rows:  # only now: if storing failed, the next task stores them
                    del self._unstored[each]
                if deleted:
                    self._count()
                    for *_, raw, worker, network in self._unstored.values():
                        self._charge(Asker(worker, network), len(raw))
        return self.find(turn) or signed


T = TypeVar("T")

SERVICE = "peers.environment.service:EnvironmentPeerService"


Check = Callable[[EnvironmentService], Awaitable[None]]


class EnvironmentSettings(RoleSettings):
    """`[environment]`: how this peer runs served environments."""

    interpreter: str = ""
    environments: list[str] = pydantic.Field(default=[])
    children: int = pydantic.Field(default=2, ge=1, le=256)
    memory_mb: int = pydantic.Field(default=2048, ge=64)
    seconds_max: float = pydantic.Field(default=30.0, gt=0, le=3600)
    waiting_max: int = pydantic.Field(default=4096, ge=1)
    turns_mb: int = pydantic.Field(default=4096, ge=16)
    requests_per_second: float = pydantic.Field(default=20.0, gt=0)


class CallFailed(SwarmError):
    """A call ended its child, took too long, or found no child; another attempt may succeed."""


class TooBusy(CallFailed):
    """Too many calls wait already."""


@dataclass(eq=False)
class _Call:
    client: str
    use: Callable[[EnvironmentService], Awaitable[Any]]
    done: trio.Event = field(default_factory=trio.Event)
    result: Any = None
    error: SwarmError | None = None

    async def run(self, service: EnvironmentService, seconds_max: float) -> bool:
        """Run the call; returns whether the child can take another."""
        usable = False
        try:
            with trio.move_on_after(seconds_max) as scope:
                self.result = await self.use(service)
                usable = True
            if scope.cancelled_caught:
                self.error = CallFailed(f"the environment took longer than {seconds_max:g} s")
        except ChildDied as error:
            self.error = CallFailed(error.hung or str(error))
        except ChildError as error:
            # A child whose sandboxes fail gets a successor, with a launcher of its own.
            self.error, usable = error, not is_childs(error, SandboxError)
        finally:
            if not usable and self.error is None:
                self.error = CallFailed("the environment peer is leaving")
            self.done.set()
        return usable


class _Queue:
    """Calls that wait for a child, by client.

    The next is one of the client with the fewest calls in children, and then with the least time in
    them, so that a client whose calls hang delays itself more than others."""

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self._most, self._now = most, now
        self._waiting: dict[str, deque[_Call]] = {}
        self._count = 0
        self._running: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        """Seconds in children, of clients that had more than the last client to be served."""
        self._level = 0.0
        """Seconds of the last client to be served; a new client begins with as many."""
        self._arrived = trio.Event()

    def put(self, call: _Call) -> None:
        """Raises `TooBusy`."""
        if self._count >= self._most:
            raise TooBusy("too many calls wait for the environment")
        self._waiting.setdefault(call.client, deque()).append(call)
        self._count += 1
        self._arrived.set()

    def drop(self, call: _Call) -> None:
        """Remove a call that nobody waits for any more, if it still waits for a child."""
        calls = self._waiting.get(call.client)
        if calls is not None and call in calls:
            calls.remove(call)
            self._took(call.client)

    async def run_next(self, run: Callable[[_Call], Awaitable[bool]]) -> bool:
        """Await `run` with the next call, and count its time; returns its result."""
        while not self._waiting:
            if self._arrived.is_set():  # an event of its own would wake the last child alone
                self._arrived = trio.Event()
            await self._arrived.wait()
        client = min(self._waiting, key=lambda each: (self._running[each], self._seconds(each)))
        call = self._waiting[client].popleft()
        self._took(client)
        self._level = max(self._level, self._seconds(client))
        self._running[client] += 1
        began = self._now()
        try:
            return await run(call)
        finally:
            self._running[client] -= 1
            self._running += Counter()  # drops zeros
            used = self._seconds(client) + self._now() - began
            self._used = {name: each for name, each in self._used.items() if each > self._level}
            self._used[client] = used

    def _seconds(self, client: str) -> float:
        return max(self._level, self._used.get(client, 0.0))

    def _took(self, client: str) -> None:
        self._count -= 1
        if not self._waiting[client]:
            del self._waiting[client]


class Pool:
    """Several children with the same environments."""

    def __init__(self, node: Node, settings: EnvironmentSettings) -> None:
        self._node, self._settings = node, settings
        self._queue = _Queue(settings.waiting_max, node.world.now)

    async def run(self, setup: EnvironmentSetup, check: Check) -> None:
        """Keep the children running; each passes `check` before its first call. Raises the error of
        a check, and `ChildDied` when a child cannot start."""
        async with trio.open_nursery() as nursery:
            for number in range(1, self._settings.children + 1):
                name = "environment" if number == 1 else f"environment-{number}"
                nursery.start_soon(self._keep, name, setup, check)

    async def _keep(self, name: str, setup: EnvironmentSetup, check: Check) -> None:
        restarts = Restarts(self._node.events, name)
        while True:
            await restarts.run(partial(self._live, name, setup, check, restarts))

    async def _live(
        self, name: str, setup: EnvironmentSetup, check: Check, restarts: Restarts
    ) -> None:
        """Run calls until one of them leaves the child unusable."""
        seconds_max = self._settings.seconds_max
        async with self._node.compute.child(
            SERVICE,
            setup,
            name=name,
            memory_limit_bytes=self._settings.memory_mb << 20,
            interpreter=self._settings.interpreter or None,
        ) as child:
            service = client(EnvironmentService, child)
            await check(service)
            restarts.succeeded()
            while await self._queue.run_next(lambda call: call.run(service, seconds_max)):
                pass

    async def call(self, client: str, use: Callable[[EnvironmentService], Awaitable[T]]) -> T:
        """Use a free child for one call. `client`: by whom the children's time is divided.

        Raises `TooBusy` if too many calls wait, `CallFailed` if the child dies or the call takes
        longer than `seconds_max`, and the `ChildError` of a method that raised."""
        call = _Call(client, use)
        self._queue.put(call)
        try:
            await call.done.wait()
        finally:
            self._queue.drop(call)
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result
