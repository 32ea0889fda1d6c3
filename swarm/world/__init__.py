"""What a simulation replaces, besides the network: clock and randomness, disk, compute.

Code above this seam is written once; it touches no `time`, global randomness, threads, files or
processes of its own. Implementations for a real machine: `swarm.world.machine` (World),
`swarm.world.disk` (Disk), `swarm.world.compute` (Compute).
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

import msgspec

from swarm.errors import SwarmError, UserError

T = TypeVar("T")


class World(Protocol):
    """Clock and randomness."""

    random: random.Random
    """Seeded in simulation. The only source of randomness above the seam, save secrets."""

    def now(self) -> float:
        """Seconds on trio's clock: for deadlines and durations, never compared across peers."""
        ...

    def wall_time(self) -> float:
        """Seconds since the epoch as this peer believes it: for envelopes only; may be skewed."""
        ...

    def correct_clock(self, seconds: float) -> None:
        """Add this to the wall time from now on: the trusted peers agree that it is off."""
        ...

    def secret_bytes(self, count: int) -> bytes:
        """Bytes that nobody can guess: nonces. Seeded in simulation."""
        ...


class Piece(Protocol):
    """Bytes that have arrived and are not yet believed."""

    size_bytes: int

    def verify(self, digest: bytes) -> bool:
        """Whether the BLAKE3-256 of the bytes is `digest`."""
        ...


class Sink(Protocol):
    """Where the transport puts one piece: a range of a file, invisible until committed."""

    size_bytes: int

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; raises `ValueError` beyond `size_bytes`, `DiskFullError` when full."""
        ...

    def finish(self) -> Piece:
        """The bytes written so far as a piece (hashed as they came)."""
        ...

    async def commit(self, piece: Piece) -> None:
        """Make a verified piece part of the file. Durable only after `Disk.sync`."""
        ...

    def abandon(self) -> None:
        """Forget what was written. Safe to call at any time, also after `commit`."""
        ...


class Database(Protocol):
    """One SQLite database (WAL, full sync: a returned transaction survives a power cut)."""

    def read(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Rows of a query, at once. SQL must ORDER BY, so that simulations repeat."""
        ...

    async def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run `function` inside one write transaction; commit, or roll back if it raises."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """A peer's files, by path relative to its home (`/` separators; no `..`, never absolute)."""

    async def read(self, path: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """Bytes of a file; raises `FileNotFoundError`."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file atomically and durably (aside, fsync, rename, fsync of the folder).

        Raises `DiskFullError`.
        """
        ...

    async def allocate(self, path: str, size_bytes: int) -> None:
        """Make (or keep) a file of exactly this size for pieces to land in; `DiskFullError`."""
        ...

    def sink(self, path: str, offset: int, size_bytes: int) -> Sink:
        """A sink for one range of an allocated file."""
        ...

    async def copy(self, path: str, offset: int, size_bytes: int, sink: Sink) -> None:
        """Append a range of a file to a sink; raises what reading and `Sink.write` raise."""
        ...

    async def digest(self, path: str, offset: int, size_bytes: int) -> bytes:
        """BLAKE3-256 of a range of a file."""
        ...

    async def sha256(self, path: str) -> bytes:
        """SHA-256 of a whole file."""
        ...

    async def sync(self, path: str) -> None:
        """fsync a file, or a folder and everything in it."""
        ...

    async def rename(self, old: str, new: str) -> None:
        """Rename a file or folder atomically; replaces a file, never a non-empty folder."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a folder with all it holds; silent when it is not there."""
        ...

    def exists(self, path: str) -> bool: ...

    def size_bytes(self, path: str) -> int:
        """Raises `FileNotFoundError`."""
        ...

    def list(self, path: str) -> list[str]:
        """Sorted names in a folder; empty when it is not there."""
        ...

    def free_bytes(self) -> int: ...

    def database(self, path: str) -> Database:
        """Open (or create) a database."""
        ...

    def local_path(self, path: str) -> Path:
        """Where children find a file or folder on this machine."""
        ...


class ChildError(SwarmError):
    """A child answered a call with an error: `kind` names the exception, the text is its own."""

    def __init__(self, message: str, kind: str = "Error") -> None:
        super().__init__(message)
        self.kind = kind


class ChildUserError(ChildError, UserError):
    """A child says what the person at the keyboard can put right."""


class ChildDied(SwarmError):
    """A child ended, exceeded its memory or missed a deadline (and was killed).

    The message names the child, how it ended, and its last lines of stderr.
    """

    def __init__(self, message: str, child: str, *, between_calls: bool = False) -> None:
        super().__init__(message)
        self.child = child
        self.between_calls = between_calls
        """It was dead before it was asked: what it was asked for is not to blame."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every request to a child process."""

    patience_seconds: ClassVar[float]
    """The call is given up after this long without progress."""


def job_type(method: Callable[..., Any]) -> type[Job]:
    """The kind of job that a service's method takes."""
    kind: type[Job] = get_type_hints(method)["job"]
    return kind


class Child(Protocol):
    """A supervised child process; calls made at the same time run at the same time, as far as its
    service lets them."""

    name: str

    async def request(self, method: str, job: Job, reply: type[T]) -> T:
        """Have the child's service do a job; its answer is decoded as `reply`.

        Raises `ChildError` if the method raised (`ChildUserError` for a `UserError`), `ChildDied`
        if the child is gone, answers with something else, or makes no progress for as long as the
        job's patience (the child is then killed). Cancelling it cancels the job; a child that goes
        on all the same is killed.
        """
        ...

    def stream(
        self, method: str, job: Job, item: type[T]
    ) -> AbstractAsyncContextManager[AsyncIterator[T]]:
        """Have a method that is an async generator do a job; leaving the block cancels it.

        The iterator raises as `request` does.
        """
        ...


class Compute(Protocol):
    """Starts child processes: engines, prefill, training, parsers of hostile files."""

    def free_memory_bytes(self) -> int:
        """What children may still use of this machine's memory."""
        ...

    def child(
        self,
        service: str,
        *,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        memory_limit_bytes: int | None = None,
        start_deadline_seconds: float = 60.0,
        interpreter: str | None = None,
    ) -> AbstractAsyncContextManager[Child]:
        """`async with compute.child("package.module:Class", name="engine") as child:`

        `Class(**arguments)` is made in the child before the block is entered; its public methods
        are async and take one `Job`. The child ends with the block. `interpreter`: path of another
        Python, which has Swarm and the service installed. Raises `ChildDied` when the child does
        not come up, `UserError` when there is no such interpreter.
        """
        ...
