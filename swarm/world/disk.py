"""A peer's files on this machine: everything below one folder, its home.

Files that must survive a power cut are written to a temporary file, synced and renamed. Small
operations run without a thread: a thread costs more (about 60 µs) than reading a few hundred
kilobytes from the page cache. Large ones, and everything that syncs, run in threads."""

import errno
import functools
import hashlib
import itertools
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import trio
from blake3 import blake3

from swarm.errors import DamagedError, DiskFullError
from swarm.world import Database, Piece, Ready, Sink

INLINE_BYTES_MAX = 512 * 1024
"""Largest read or hash that runs without a thread: a thread costs as much as 100 KB."""

BUFFER_BYTES = 1 << 20
"""Bytes read at once for hashing, into one buffer: fresh memory costs as much as hashing it."""

T = TypeVar("T")

_ASIDE = ".aside"


async def _run(function: Callable[[], T], size_bytes: int) -> T:
    """Run a function directly if its data is small, else in a thread."""
    return function() if size_bytes <= INLINE_BYTES_MAX else await trio.to_thread.run_sync(function)


async def _hashed(hasher: Any, local: Path, offset: int, size_bytes: int) -> bytes:
    def digest() -> bytes:
        for block in _blocks(local, offset, size_bytes):
            hasher.update(block)
        result: bytes = hasher.digest()
        return result

    return await _run(digest, 4 * size_bytes)


class LocalPiece:
    """Bytes that have arrived, hashed while they were written."""

    def __init__(self, size_bytes: int, digest: bytes) -> None:
        self.size_bytes = size_bytes
        self._digest = digest

    def verify(self, digest: bytes) -> bool:
        return self._digest == digest


class LocalSink:
    """A range of a file. Bytes are written in place, but count only once committed."""

    def __init__(self, disk: "LocalDisk", path: str, offset: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._disk = disk
        self._path = path
        self._offset = offset
        self._written = 0
        self._hasher = blake3()
        self._descriptor: int | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._written + len(data) > self.size_bytes:
            raise ValueError(
                f"{self._path}: more than the {self.size_bytes} bytes announced arrived"
            )
        if self._descriptor is None:
            self._descriptor = self._disk.open_for_writing(
                self._path, self._offset + self.size_bytes
            )
        view = memoryview(data)
        self._hasher.update(view)
        while view:
            try:
                count = os.pwrite(self._descriptor, view, self._offset + self._written)
            except OSError as error:
                raise self._disk.full_error(error, self._path, len(view)) from error
            self._written += count
            view = view[count:]

    def finish(self) -> Piece:
        return LocalPiece(self._written, self._hasher.digest())

    async def commit(self, piece: Piece) -> None:
        if piece.size_bytes != self.size_bytes:
            raise ValueError(
                f"{self._path}: {piece.size_bytes} bytes arrived of {self.size_bytes} announced"
            )
        self.abandon()

    def abandon(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.abandon()


class LocalDatabase:
    """SQLite with WAL and full sync: a transaction that returned survives a power cut.

    Two connections, so that a read never sees half a transaction."""

    def __init__(self, path: Path) -> None:
        """Raises `DamagedError`, as `read` and `transact` do, for a file that is no database."""
        self._path = path
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise self._explained(error) from error
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._reader = sqlite3.connect(path, isolation_level=None)
        self._reader.execute("PRAGMA query_only = ON")
        self._writing = trio.Lock()

    def read(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._reader.execute(sql, parameters).fetchall()
        except sqlite3.DatabaseError as error:
            raise self._explained(error) from error

    async def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = function(self._connection)
                self._connection.execute("COMMIT")
            except BaseException as error:
                if self._connection.in_transaction:  # on a full disk SQLite rolls back by itself
                    self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.DatabaseError):
                    raise self._explained(error) from error
                raise
            return result

        # A thread, because COMMIT waits for the disk; shielded, because a transaction that has
        # begun must end before the connection is used or closed.
        async with self._writing:
            with trio.CancelScope(shield=True):
                result = await trio.to_thread.run_sync(run)
            return result  # noqa: RET504 (mypy thinks the block above may swallow)

    def _explained(self, error: sqlite3.DatabaseError) -> Exception:
        """What to do about an error of the disk; other errors are what they are."""
        code = int(getattr(error, "sqlite_errorcode", 0)) & 0xFF  # without the extended code
        if code == sqlite3.SQLITE_FULL:
            return DiskFullError(
                f"{self._path} cannot grow, the disk is full; free some space, or choose "
                "a --home on a larger disk"
            )
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR):
            return DamagedError(
                f"{self._path} is damaged ({error}); restore it from a backup. A ledger.sqlite "
                "may also be moved away: the other trusted peers have a copy of the log"
            )
        return error

    def close(self) -> None:
        self._reader.close()
        self._connection.close()


class LocalDisk:
    """Implements `swarm.world.Disk` below `root`, within `quota_bytes` if given."""

    def __init__(self, root: Path, quota_bytes: int | None = None) -> None:
        self._root = root.absolute()
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._quota_bytes = quota_bytes
        self._asides = itertools.count()
        """Numbers of temporary files: two concurrent writes of one file must not share one."""

    def local_path(self, path: str) -> Path:
        """Path of a file or folder on this machine; `ValueError` for a path outside the home."""
        return _place(self._root, path)

    # --- files -------------------------------------------------------------------------------

    async def read(self, path: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        local = self.local_path(path)
        count = local.stat().st_size - offset if size_bytes is None else size_bytes

        def read() -> bytes:
            with local.open("rb") as file:
                file.seek(offset)
                return file.read(max(0, count))

        return await _run(read, count)

    async def write(self, path: str, data: bytes) -> None:
        local = self.local_path(path)
        self._check_room(path, len(data))

        aside = local.with_name(f"{local.name}.{next(self._asides)}{_ASIDE}")

        def write() -> None:
            _make_folder(local.parent)
            replace_file(local, data, aside)

        try:
            await trio.to_thread.run_sync(write)
        except OSError as error:
            raise self.full_error(error, path, len(data)) from error

    async def allocate(self, path: str, size_bytes: int) -> None:
        descriptor = self.open_for_writing(path, size_bytes)
        try:
            os.ftruncate(descriptor, size_bytes)
        except OSError as error:
            raise self.full_error(error, path, size_bytes) from error
        finally:
            os.close(descriptor)

    def sink(self, path: str, offset: int, size_bytes: int) -> Sink:
        self.local_path(path)  # refuse a bad path now, not at the first write
        return LocalSink(self, path, offset, size_bytes)

    def open_for_writing(self, path: str, size_bytes: int) -> int:
        """Open a file that will have `size_bytes`, or create it; returns its descriptor."""
        local = self.local_path(path)
        # Usually it was allocated: then this takes one call, thousands of times per checkpoint.
        try:
            descriptor = os.open(local, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            descriptor = -1
        if descriptor >= 0:
            if os.fstat(descriptor).st_size >= size_bytes:
                return descriptor
            os.close(descriptor)
        self._check_room(path, size_bytes - (local.stat().st_size if local.exists() else 0))
        try:
            _make_folder(local.parent)
            return os.open(local, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self.full_error(error, path, 0) from error

    async def copy(self, path: str, offset: int, size_bytes: int, sink: Sink) -> None:
        sink.write(await self.read(path, offset, size_bytes))

    async def digest(self, path: str, offset: int, size_bytes: int) -> bytes:
        return await _hashed(blake3(), self.local_path(path), offset, size_bytes)

    async def sha256(self, path: str, ready: Ready | None = None) -> bytes:
        hasher, done, size = hashlib.sha256(), 0, self.size_bytes(path)
        digest = hasher.digest()
        while done < size:
            until = size if ready is None else await ready(done)
            digest = await _hashed(hasher, self.local_path(path), done, until - done)
            done = until
        return digest

    async def sync(self, path: str) -> None:
        local = self.local_path(path)

        def sync() -> None:
            if local.is_dir():
                for folder, _, names in os.walk(local):
                    for name in sorted(names):
                        sync_path(Path(folder, name))
                    sync_path(Path(folder))
            else:
                sync_path(local)
            sync_path(local.parent)

        await trio.to_thread.run_sync(sync)

    async def rename(self, old: str, new: str) -> None:
        target = self.local_path(new)
        _make_folder(target.parent)
        self.local_path(old).rename(target)

    async def remove(self, path: str) -> None:
        local = self.local_path(path)
        if local.is_dir() and not local.is_symlink():
            await trio.to_thread.run_sync(lambda: shutil.rmtree(local))
        else:
            local.unlink(missing_ok=True)

    def exists(self, path: str) -> bool:
        return self.local_path(path).exists()

    def size_bytes(self, path: str) -> int:
        return self.local_path(path).stat().st_size

    def list(self, path: str) -> list[str]:
        local = self.local_path(path)
        if not local.is_dir():
            return []
        # Skip temporary files: a power cut may have left some.
        return sorted(entry.name for entry in local.iterdir() if entry.suffix != _ASIDE)

    def database(self, path: str) -> Database:
        local = self.local_path(path)
        _make_folder(local.parent)
        return LocalDatabase(local)

    # --- free space --------------------------------------------------------------------------

    def free_bytes(self) -> int:
        free = shutil.disk_usage(self._root).free
        if self._quota_bytes is None:
            return free
        return max(0, min(free, self._quota_bytes - self._used_bytes()))

    def _used_bytes(self) -> int:
        used = 0
        for folder, _, names in os.walk(self._root):
            for name in names:
                try:
                    used += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118
                except FileNotFoundError:
                    continue  # removed meanwhile
        return used

    def _check_room(self, path: str, needed_bytes: int) -> None:
        if needed_bytes <= 0:
            return
        free = self.free_bytes()
        if needed_bytes > free:
            raise self._full(path, needed_bytes, free)

    def _full(self, path: str, needed_bytes: int, free: int) -> DiskFullError:
        limit = " of --home's quota" if self._quota_bytes is not None else ""
        return DiskFullError(
            f"{self.local_path(path)} needs {needed_bytes:,} bytes and {free:,}{limit} are free; "
            "free some space, or choose a --home on a larger disk"
        )

    def full_error(self, error: OSError, path: str, needed_bytes: int) -> Exception:
        """Convert the error of a full disk to `DiskFullError`; return any other error unchanged."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._full(path, needed_bytes, self.free_bytes())
        return error


@functools.lru_cache(maxsize=1024)
def _place(root: Path, path: str) -> Path:
    """`LocalDisk.local_path`, cached, since every piece of a file calls it several times."""
    parts = path.split("/")
    if path.startswith("/") or "" in parts or ".." in parts or "." in parts or "\0" in path:
        raise ValueError(f"{path!r} is not a path within a peer's home")
    return root.joinpath(*parts)


def _blocks(local: Path, offset: int, size_bytes: int) -> Iterator[memoryview]:
    """The bytes of a range in blocks, each valid until the next; fewer if the file is shorter."""
    buffer = memoryview(bytearray(min(size_bytes, BUFFER_BYTES)))
    with local.open("rb", buffering=0) as file:
        file.seek(offset)
        left = size_bytes
        while left > 0:
            count = file.readinto(buffer[: min(left, len(buffer))])
            if not count:
                return
            left -= count
            yield buffer[:count]


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_path(place.parent)


def replace_file(path: Path, data: bytes, aside: Path | None = None) -> None:
    """Write a file whole and durably, first at `aside`; only this user may read it."""
    aside = aside or path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """fsync a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
