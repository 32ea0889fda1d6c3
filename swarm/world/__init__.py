"""The seam to the machine: clock and randomness, disk, compute. A simulation replaces these.

Code above this seam is written once: it uses no `time`, global randomness, threads, files or
processes directly. Implementations for a real machine: `swarm.world.machine` (World),
`swarm.world.disk` (Disk), `swarm.world.compute` (Compute).

For other rooms, by the names in docs/rooms.md: `__init__`, `child`, `compute`, `disk`,
`fork_server`, `home`, `landlock`, `machine`, `observable`, `process`, `progress`, `recent`,
`restarts`, `tasks`
"""

import inspect
import random
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, TypeVar, cast, get_type_hints

import msgspec

from swarm.errors import SwarmError, UserError

T = TypeVar("T")


class World(Protocol):
    """Clock and randomness."""

    random: random.Random
    """The only source of randomness above the seam, except for secrets; seeded in simulation."""

    def now(self) -> float:
        """Seconds on trio's clock: for deadlines and durations, never compared across peers."""

    def wall_time(self) -> float:
        """Seconds since the epoch by this peer's clock, which may be wrong: for envelopes only."""

    def correct_clock(self, seconds: float) -> None:
        """Add `seconds` to the wall time from now on: the trusted peers agree that it is wrong."""

    def secret_bytes(self, count: int) -> bytes:
        """Unpredictable bytes, for nonces; seeded in simulation."""


class Piece(Protocol):
    """Bytes that have arrived and are not yet verified."""

    size_bytes: int

    def verify(self, digest: bytes) -> bool:
        """Whether the BLAKE3-256 of the bytes is `digest`."""


class Sink(Protocol):
    """A writer for one piece: a range of a file, invisible until committed."""

    size_bytes: int

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; raises `ValueError` beyond `size_bytes`, `DiskFullError` when full."""

    def finish(self) -> Piece:
        """The bytes written so far, as a piece (hashed while they were written)."""

    async def commit(self, piece: Piece) -> None:
        """Make a verified piece part of the file. It is durable only after `Disk.sync`."""

    def abandon(self) -> None:
        """Discard the written bytes. Safe to call at any time, also after `commit`."""


class Database(Protocol):
    """One SQLite database (WAL, full sync: a returned transaction survives a power cut)."""

    def read(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query. The SQL must ORDER BY, so that simulations are reproducible."""

    async def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run `function` inside one write transaction; commit, or roll back if it raises."""

    def close(self) -> None: ...


async def execute(database: Database, *statements: str | tuple[str, Sequence[Any]]) -> None:
    """Run statements, each perhaps with its parameters, inside one write transaction."""

    def run(connection: sqlite3.Connection) -> None:
        for statement in statements:
            connection.execute(*(statement if isinstance(statement, tuple) else (statement,)))

    await database.transact(run)


Ready = Callable[[int], Awaitable[int]]
"""Waits until a file may be read beyond an offset; returns the offset up to which it may be."""


class Disk(Protocol):
    """A peer's files, by path relative to its home (`/` separators; no `..`, never absolute)."""

    async def read(self, path: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """Read bytes of a file; raises `FileNotFoundError`."""

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file atomically and durably; raises `DiskFullError`.

        (Write a temporary file beside it, fsync, rename, fsync of the folder.)
        """

    async def allocate(self, path: str, size_bytes: int) -> None:
        """Make (or keep) a file of exactly this size, for pieces; raises `DiskFullError`."""

    def sink(self, path: str, offset: int, size_bytes: int) -> Sink:
        """A sink for one range of an allocated file."""

    async def copy(self, path: str, offset: int, size_bytes: int, sink: Sink) -> None:
        """Append a range of a file to a sink; raises what `read` and `Sink.write` raise."""

    async def digest(self, path: str, offset: int, size_bytes: int) -> bytes:
        """BLAKE3-256 of a range of a file."""

    async def sha256(self, path: str, ready: Ready | None = None) -> bytes:
        """SHA-256 of a whole file; with `ready`, of one that is still being written in order."""

    async def sync(self, path: str) -> None:
        """fsync a file, or a folder and everything in it."""

    async def rename(self, old: str, new: str) -> None:
        """Rename a file or folder atomically; replaces a file, never a non-empty folder."""

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents; silent when it does not exist."""

    def exists(self, path: str) -> bool: ...

    def size_bytes(self, path: str) -> int:
        """Size of a file; raises `FileNotFoundError`."""

    def list(self, path: str) -> list[str]:
        """Sorted names in a folder; empty when it does not exist."""

    def free_bytes(self) -> int: ...

    def database(self, path: str) -> Database:
        """Open (or create) a database."""

    def local_path(self, path: str) -> Path:
        """Path of a file or folder on this machine, for child processes."""


class ChildError(SwarmError):
    """A child answered a call with an error. `kind`: see `kind_of`."""

    def __init__(self, message: str, kind: str = "Error") -> None:
        super().__init__(message)
        self.kind = kind


def kind_of(error: BaseException) -> str:
    """The class name of a child's exception; "OSError" for all its subclasses."""
    return "OSError" if isinstance(error, OSError) else type(error).__name__


class ChildUserError(ChildError, UserError):
    """A child answered a call with a `UserError`: an error that the user can fix."""


def is_childs(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether a child answered a call with an exception of this very class."""
    return isinstance(error, ChildError) and error.kind == kind.__name__


def error_of(message: str, kind: str, is_users: bool) -> ChildError:
    return (ChildUserError if is_users else ChildError)(message, kind)


class ChildDied(SwarmError):
    """A child ended, exceeded its memory limit or missed a deadline (and was killed).

    The message names the child, how it ended, and its last lines of stderr.
    """

    def __init__(
        self, message: str, child: str, *, blameless: bool = False, hung: str = ""
    ) -> None:
        super().__init__(message)
        self.child = child
        self.hung = hung
        """The sentence about the call that did not return, if one ended the child; else empty."""
        self.blameless = blameless
        """The job did not cause its death: the child was dead before, or its fork server died."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every request to a child process; itself that of a method without parameters."""

    patience_seconds: ClassVar[float] = 120.0
    """The call is given up, and the child killed, after this long without progress."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what a service is made with: the only parameter of its class, `setup`."""


def setup_type(make: Callable[..., Any]) -> Any:
    """The type of setup that a service is made with; None if it takes none."""
    if getattr(make, "__init__", None) is object.__init__:
        return None  # and no parser of signatures in text, which takes long to load
    parameter = inspect.signature(make, eval_str=True).parameters.get("setup")
    return None if parameter is None else parameter.annotation


def job_type(method: Callable[..., Any]) -> type[Job] | None:
    """The type of job that a service's method takes; None if it takes none."""
    kind: type[Job] | None = get_type_hints(method).get("job")
    return kind


class Child(Protocol):
    """A supervised child process. Calls may run concurrently, as far as its service allows."""

    name: str

    async def request(self, method: str, job: Job, reply: type[T]) -> T:
        """Let the child's service do a job; its answer is decoded as `reply`.

        Raises `ChildError` if the method raised (`ChildUserError` for a `UserError`). Raises
        `ChildDied` if the child has ended, gives an answer of another type, or makes no progress
        for the job's patience (the child is then killed). Cancelling the call cancels the job; a
        child that does not stop is killed.
        """


def client(service: type[T], child: Child) -> T:
    """A client of a child's service: it has the methods of `service`, a `Protocol`."""

    def caller(name: str, reply: Any) -> Callable[..., Awaitable[Any]]:
        return lambda job=Job(): child.request(name, job, reply)  # noqa: B008 (it is frozen)

    methods = {
        name: caller(name, get_type_hints(method)["return"])
        for name, method in vars(service).items()
        if inspect.iscoroutinefunction(method)
    }
    return cast(T, SimpleNamespace(**methods))


class Compute(Protocol):
    """Starts child processes: engines, prefill, training, parsers of hostile files."""

    def free_memory_bytes(self) -> int:
        """Memory of this machine that children may still use."""

    def child(
        self,
        service: str,
        setup: Setup | None = None,
        *,
        name: str,
        memory_limit_bytes: int | None = None,
        start_deadline_seconds: float = 60.0,
        interpreter: str | None = None,
    ) -> AbstractAsyncContextManager[Child]:
        """Start a child: `async with compute.child("package.module:Class", setup, name="engine")
        as child`.

        `Class(setup)` (without a setup: `Class()`) is made in the child before the block is
        entered; its public methods are async and take one `Job`, or nothing. The child
        ends with the block. `interpreter`: path of another Python, in which Swarm and the service
        are installed. Raises `ChildDied` when the child does not start, `UserError` when there is
        no such interpreter.
        """
