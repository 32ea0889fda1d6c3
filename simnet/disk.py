"""A peer's disk in memory: it can be slow or full, lose power, and hold content without bytes.

A file is a sequence of *extents*: real bytes, or a `Symbol`, a range of content that exists in name
only, whose digest follows from its name and range: so checkpoints of 62 GB cost little memory.

A power cut follows an ordered journal, as on ext4. Synced data survives. Of the creations, renames
and removals since the last sync of any file, a prefix survives. Each range written since its file's
last sync survives or vanishes by seed."""

import hashlib
import sqlite3
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any, TypeVar

import trio
from blake3 import blake3

from simnet.extents import Content, Extents, SimulatedSink, Symbol, size_of
from swarm.errors import DiskFullError
from swarm.rollouts.seeds import digest as digest_of
from swarm.world import Database, Ready, Sink

CAPACITY_BYTES = 1 << 40

READ_BYTES_MAX = 1 << 30
"""Most zeros of a sparse file in one read; more would be a scenario's mistake."""


class PowerCut(OSError):
    """The machine lost power, which ends every operation in progress."""


Names = list[str]
T = TypeVar("T")


class File:
    """A file's content and size, now and as of the last sync."""

    def __init__(self, size_bytes: int = 0) -> None:
        self.size_bytes = size_bytes
        self.extents = Extents()
        self.synced = Extents()
        self.written: list[tuple[int, int]] = []

    def put(self, start: int, content: Content) -> None:
        self.extents.put(start, content)
        self.written.append((start, start + size_of(content)))
        self.size_bytes = max(self.size_bytes, start + size_of(content))

    def sync(self) -> None:
        self.synced = self.extents.copy()
        self.written.clear()

    def crash(self, chance: Random) -> None:
        """Go back to the last sync, except for ranges that `chance` lets survive."""
        now, self.extents = self.extents, self.synced
        for start, end in self.written:
            if chance.random() < 0.5:
                for offset, content in now.get(start, end):
                    self.extents.put(offset, content)
        self.sync()


class SimulatedDisk:
    """Implements `swarm.world.Disk`: a read or write takes its size / `bytes_per_second`, a sync or
    commit `sync_seconds` more. Databases do not count towards `capacity_bytes`."""

    def __init__(
        self,
        home: str = "peer",
        *,
        capacity_bytes: int = CAPACITY_BYTES,
        bytes_per_second: float = 1e9,
        sync_seconds: float = 0.002,
    ) -> None:
        self._home = Path("/simulated") / home
        self.capacity_bytes = capacity_bytes
        self.bytes_per_second = bytes_per_second
        self.sync_seconds = sync_seconds
        self._files: dict[str, File] = {}
        self._names: Names = []
        """Their names, sorted, so that those in a folder stand side by side."""
        self._durable: dict[str, File] = {}
        """Files by name, as of the last sync."""
        self._journal: list[dict[str, File | None]] = []
        """Changes of names since then; each one is atomic."""
        self.used_bytes = 0
        """Bytes of all files; databases do not count."""
        self._databases: dict[str, sqlite3.Connection] = {}
        self._off = False
        self._held: trio.Event | None = None
        self.asleep = False
        """Whether the machine sleeps while it is held: then its children's timers stand still."""
        self._filled_bytes = 0

    # --- power ---

    def lose_power(self) -> None:
        self._off = True

    def recover(self, chance: Random) -> None:
        """Restore power: keep the synced data and, by `chance`, some of the unsynced data."""
        for change in self._journal[: chance.randint(0, len(self._journal))]:
            _apply(self._durable, change)
        self._journal.clear()
        self._files, self._names = {}, []
        self._apply_now(dict(self._durable))
        for name in self._names:
            self._files[name].crash(chance)
        self.used_bytes = sum(file.size_bytes for file in self._files.values())
        self._off = False

    def check_power(self) -> None:
        if self._off:
            raise PowerCut("the machine has lost power")

    def come_back(self) -> None:
        """Undo `lose_power` without loss: only the process had died."""
        self._off = False

    def files(self) -> Names:
        return [*self._names]

    def databases(self) -> Names:
        return sorted(self._databases)

    # --- what a simulation does to a disk ---

    def hold(self) -> None:
        """Answer nothing until `go_on`."""
        if self._held is None:
            self._held = trio.Event()

    def go_on(self) -> None:
        if self._held is not None:
            self._held.set()
            self._held = None

    async def answering(self) -> None:
        while self._held is not None:
            await self._held.wait()

    def slow_down(self, factor: float) -> None:
        """Make every operation take `factor` times as long from now on."""
        self.bytes_per_second /= factor
        self.sync_seconds *= factor

    def fill(self) -> None:
        """Use up all free space, as another program would."""
        free = self.free_bytes()
        self._filled_bytes += free
        self.capacity_bytes -= free

    def make_room(self) -> None:
        self.capacity_bytes += self._filled_bytes
        self._filled_bytes = 0

    def put(self, path: str, offset: int, content: Content) -> None:
        """Write at once, unsynced; creates the file. Raises `DiskFullError`."""
        self._check(path)
        file = self._files.get(path)
        size = offset + size_of(content)
        self._make_room(path, size - (file.size_bytes if file is not None else 0))
        if file is None:
            file = File()
            self._change({path: file})
        self.used_bytes += max(0, size - file.size_bytes)
        file.put(offset, content)

    def symbol(self, path: str, offset: int, size_bytes: int) -> Symbol | None:
        """The symbol that fills the whole range, if one does."""
        found = self._file(path).extents.get(offset, offset + size_bytes)
        if (
            len(found) == 1
            and isinstance(found[0][1], Symbol)
            and size_of(found[0][1]) == size_bytes
        ):
            return found[0][1]
        return None

    def names_in(self, path: str) -> Names:
        """Names of the contents of a file without bytes, in order; "?" for gaps and bytes."""
        file = self._file(path)
        names, done = [], 0
        for offset, content in file.extents.get(0, file.size_bytes):
            whole = isinstance(content, Symbol) and offset == done and content.start == offset
            names.append(content.name if whole and isinstance(content, Symbol) else "?")
            done = offset + size_of(content)
        return names if done == file.size_bytes else [*names, "?"]

    def path_of(self, local: str) -> str:
        """The path on this disk of a path that `local_path` gave to a child."""
        return str(PurePosixPath(local).relative_to(self._home))

    # --- files ---

    async def read(self, path: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        file = self._file(path)
        end = file.size_bytes if size_bytes is None else min(file.size_bytes, offset + size_bytes)
        await self._take_seconds(end - offset)
        return self._bytes(path, offset, end)

    def _bytes(self, path: str, start: int, end: int) -> bytes:
        found = self._file(path).extents.get(start, end)
        if len(found) == 1 and isinstance(found[0][1], bytes) and len(found[0][1]) == end - start:
            return found[0][1]
        if end - start > READ_BYTES_MAX:
            raise OSError(f"{path}: {end - start} bytes are too many to read in a simulation")
        data = bytearray(max(0, end - start))
        for offset, content in found:
            if isinstance(content, Symbol):
                raise OSError(f"{path}: this content exists in name only and cannot be read")
            data[offset - start : offset - start + len(content)] = content
        return bytes(data)

    async def write(self, path: str, data: bytes) -> None:
        self._check(path)
        held = self._files.get(path)
        # Written under another name first, so for a moment there are two copies.
        self._make_room(path, len(data))
        await self._take_seconds(len(data), syncs=True)
        file = File()
        file.put(0, bytes(data))
        file.sync()
        held = self._files.get(path)
        self.used_bytes += len(data) - (held.size_bytes if held is not None else 0)
        self._change({path: file})
        self._sync_names()

    async def allocate(self, path: str, size_bytes: int) -> None:
        self._check(path)
        await trio.lowlevel.checkpoint()
        held = self._files.get(path)
        held_bytes = held.size_bytes if held is not None else 0
        self._make_room(path, size_bytes - held_bytes)
        if held is None:
            self._change({path: File(size_bytes)})
        else:
            held.size_bytes = size_bytes
            held.extents.cut(size_bytes)
        self.used_bytes += size_bytes - held_bytes

    def sink(self, path: str, offset: int, size_bytes: int) -> Sink:
        self._check(path)
        return SimulatedSink(self.put, path, offset, size_bytes)

    async def copy(self, path: str, offset: int, size_bytes: int, sink: Sink) -> None:
        symbol = self.symbol(path, offset, size_bytes)
        if symbol is not None and isinstance(sink, SimulatedSink):
            await self._take_seconds(size_bytes)
            sink.land(symbol)
        else:
            sink.write(await self.read(path, offset, size_bytes))

    async def digest(self, path: str, offset: int, size_bytes: int) -> bytes:
        self._file(path)
        await self._take_seconds(size_bytes)
        return self.digest_now(path, offset, size_bytes)

    def digest_now(self, path: str, offset: int, size_bytes: int) -> bytes:
        """`digest` without taking virtual time, for observers."""
        symbol = self.symbol(path, offset, size_bytes)
        if symbol is not None:
            return symbol.digest()
        end = min(self._file(path).size_bytes, offset + size_bytes)
        if any(isinstance(part, Symbol) for _, part in self._file(path).extents.get(offset, end)):
            return self._mixed_digest(path, offset, end)
        return blake3(self._bytes(path, offset, end)).digest()

    async def sha256(self, path: str, ready: Ready | None = None) -> bytes:
        """SHA-256 of a file, or its stand-in for content without bytes."""
        size_bytes, done = self._file(path).size_bytes, 0
        while done < size_bytes:
            until = size_bytes if ready is None else await ready(done)
            await self._take_seconds(until - done)
            done = until
        if any(isinstance(part, Symbol) for _, part in self._file(path).extents.get(0, size_bytes)):
            return self._mixed_digest(path, 0, size_bytes)
        return hashlib.sha256(self._bytes(path, 0, size_bytes)).digest()

    def _mixed_digest(self, path: str, start: int, end: int) -> bytes:
        fields = []
        for offset, content in self._file(path).extents.get(start, end):
            fields += [
                (offset - start).to_bytes(8, "big"),
                content.digest() if isinstance(content, Symbol) else blake3(content).digest(),
            ]
        return digest_of("simnet/1/mixed", (end - start).to_bytes(8, "big"), *fields)

    async def sync(self, path: str) -> None:
        self._check(path)
        names = self._under(path)
        if not names:
            raise FileNotFoundError(path)
        written = sum(e - s for name in names for s, e in self._files[name].written)
        await self._take_seconds(written, syncs=True)
        for name in self._under(path):
            self._files[name].sync()
        self._sync_names()

    async def rename(self, old: str, new: str) -> None:
        self._check(old)
        self._check(new)
        await trio.lowlevel.checkpoint()
        self.check_power()
        names = self._under(old)
        if not names:
            raise FileNotFoundError(old)
        if old == new:
            return
        replaced = self._files.get(new)
        if replaced is None and self._under(new):
            raise OSError(f"{new} is a folder that is not empty")
        if replaced is not None:
            self.used_bytes -= replaced.size_bytes
        change: dict[str, File | None] = dict.fromkeys(names)
        change |= {new + name[len(old) :]: self._files[name] for name in names}
        self._change(change)

    async def remove(self, path: str) -> None:
        self._check(path)
        await trio.lowlevel.checkpoint()
        self.check_power()
        for name in self._under(path):
            self.used_bytes -= self._files[name].size_bytes
            self._change({name: None})

    def exists(self, path: str) -> bool:
        self._check(path)
        return bool(self._under(path))

    def size_bytes(self, path: str) -> int:
        return self._file(path).size_bytes

    def list(self, path: str) -> Names:
        self._check(path)
        names = self._under(path)
        return sorted({name[len(path) + 1 :].split("/")[0] for name in names if name != path})

    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.used_bytes)

    def database(self, path: str) -> Database:
        self._check(path)
        if path not in self._databases:
            connection = sqlite3.connect(":memory:", isolation_level=None)
            # Most tables have a few rows: pages of 4 KB would be a twentieth of a peer's memory.
            connection.execute("PRAGMA page_size = 1024")
            connection.execute("PRAGMA foreign_keys = ON")
            self._databases[path] = connection
        return SimulatedDatabase(self, self._databases[path])

    def local_path(self, path: str) -> Path:
        """A path for simulated children only: no such file exists on this machine."""
        self._check(path)
        return self._home.joinpath(*path.split("/"))

    def close(self) -> None:
        """Close the databases: the simulation is over."""
        for connection in self._databases.values():
            connection.close()
        self._databases.clear()

    # --- inside ---

    def _check(self, path: str) -> None:
        self.check_power()
        if path in self._files:
            return  # it was checked when the file was created
        parts = path.split("/")
        if path.startswith("/") or "" in parts or ".." in parts or "." in parts or "\0" in path:
            raise ValueError(f"{path!r} is not a path within a peer's home")

    def _file(self, path: str) -> File:
        self._check(path)
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path]

    def _under(self, path: str) -> Names:
        if path in self._files:
            return [path]
        names = self._names  # "0" comes next after "/"
        return names[bisect_left(names, path + "/") : bisect_left(names, path + "0")]

    def _make_room(self, path: str, needed_bytes: int) -> None:
        if needed_bytes > self.free_bytes():
            raise DiskFullError(
                f"{self._home}/{path} needs {needed_bytes:,} bytes and {self.free_bytes():,} are "
                "free; free some space, or choose a --home on a larger disk"
            )

    def _change(self, change: dict[str, File | None]) -> None:
        self._apply_now(change)
        self._journal.append(change)

    def _apply_now(self, change: Mapping[str, File | None]) -> None:
        for name, file in change.items():
            if file is not None and name not in self._files:
                insort(self._names, name)
            elif file is None and name in self._files:
                del self._names[bisect_left(self._names, name)]
        _apply(self._files, change)

    def _sync_names(self) -> None:
        for change in self._journal:
            _apply(self._durable, change)
        self._journal.clear()

    async def _take_seconds(self, size_bytes: int, *, syncs: bool = False) -> None:
        await self.answering()
        seconds = max(0, size_bytes) / self.bytes_per_second
        await trio.sleep(seconds + (self.sync_seconds if syncs else 0.0))
        self.check_power()


def _apply(names: dict[str, File], change: Mapping[str, File | None]) -> None:
    for name, file in change.items():
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


class SimulatedDatabase:
    """SQLite in memory, kept when closed; a power cut undoes only unfinished transactions."""

    def __init__(self, disk: SimulatedDisk, connection: sqlite3.Connection) -> None:
        self._disk = disk
        self._connection = connection
        self._writing = trio.Lock()
        self._closed = False

    def _check_open(self) -> None:
        self._disk.check_power()
        if self._closed:
            raise sqlite3.ProgrammingError("Cannot operate on a closed database.")

    def read(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        self._check_open()
        return self._connection.execute(sql, parameters).fetchall()

    async def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        async with self._writing:
            # Shielded as on the real disk. The wait comes first, so that no reader sees an effect
            # that a power cut could still undo.
            with trio.CancelScope(shield=True):
                await self._disk.answering()
                await trio.sleep(self._disk.sync_seconds)
            self._check_open()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = function(self._connection)
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            return result

    def close(self) -> None:
        self._closed = True
