"""A disk in memory that can lose power: what was not synced is lost or zero afterwards."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import trio
from blake3 import blake3

from swarm.errors import DiskFullError
from swarm.world import Database, Piece, Sink
from swarm.world.disk import LocalPiece


class PowerCut(Exception):
    """The machine stopped at this operation."""


class _File:
    def __init__(self, size: int = 0) -> None:
        self.data = bytearray(size)
        self.durable: bytes | None = None


class MemorySink:
    """Writes in place, as the real one does."""

    def __init__(self, disk: MemoryDisk, path: str, offset: int, size_bytes: int) -> None:
        self._disk, self._path, self._offset = disk, path, offset
        self.size_bytes = size_bytes
        self._data = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        if len(self._data) + len(data) > self.size_bytes:
            raise ValueError("beyond the sink's size")
        file = self._disk.files[self._path]
        start = self._offset + len(self._data)
        file.data[start : start + len(data)] = data
        self._data += data

    def finish(self) -> Piece:
        return LocalPiece(len(self._data), blake3(self._data).digest())

    async def commit(self, piece: Piece) -> None:
        await self._disk.step("commit")

    def abandon(self) -> None:
        self._data = bytearray()


class MemoryDisk:
    """`swarm.world.Disk` over a dictionary. `cut_at` = n stops the n-th changing operation."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.files: dict[str, _File] = {}
        self.capacity = capacity
        self.steps = 0
        self.syncs = 0
        self.cut_at: int | None = None
        self.before: Callable[[str], None] = lambda operation: None

    async def step(self, operation: str) -> None:
        await trio.lowlevel.checkpoint()
        self.before(operation)
        self.steps += 1
        if self.cut_at is not None and self.steps >= self.cut_at:
            raise PowerCut(operation)

    def power_cut(self, rng: random.Random) -> None:
        """Forget what was never synced: such a file is gone, or there with holes."""
        self.cut_at = None
        for path, file in list(self.files.items()):
            if file.durable is not None:
                file.data = bytearray(file.durable)
            elif rng.random() < 0.3:
                del self.files[path]
            else:
                for start in range(0, len(file.data), 4096):
                    if rng.random() < 0.3:
                        end = min(start + 4096, len(file.data))
                        file.data[start:end] = bytes(end - start)

    def _file(self, path: str) -> _File:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def _under(self, path: str) -> list[str]:
        return [name for name in sorted(self.files) if name == path or name.startswith(path + "/")]

    async def read(self, path: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        end = None if size_bytes is None else offset + size_bytes
        return bytes(self._file(path).data[offset:end])

    async def write(self, path: str, data: bytes) -> None:
        await self.step("write")
        file = self.files[path] = _File()
        file.data = bytearray(data)
        file.durable = bytes(data)
        self.syncs += 1

    async def allocate(self, path: str, size_bytes: int) -> None:
        await self.step("allocate")
        if path in self.files and len(self.files[path].data) == size_bytes:
            return
        if size_bytes > self.free_bytes():
            raise DiskFullError(f"no room for {path}")
        self.files[path] = _File(size_bytes)

    def sink(self, path: str, offset: int, size_bytes: int) -> MemorySink:
        return MemorySink(self, path, offset, size_bytes)

    async def copy(self, path: str, offset: int, size_bytes: int, sink: Sink) -> None:
        sink.write(await self.read(path, offset, size_bytes))

    async def digest(self, path: str, offset: int, size_bytes: int) -> bytes:
        return blake3(await self.read(path, offset, size_bytes)).digest()

    async def sha256(self, path: str) -> bytes:
        return hashlib.sha256(await self.read(path)).digest()

    async def sync(self, path: str) -> None:
        await self.step("sync")
        for name in self._under(path):
            self.files[name].durable = bytes(self.files[name].data)
            self.syncs += 1

    async def rename(self, old: str, new: str) -> None:
        await self.step("rename")
        if self._under(new) and new not in self.files:
            raise OSError(f"{new} is not empty")
        for name in self._under(old):
            self.files[new + name[len(old) :]] = self.files.pop(name)

    async def remove(self, path: str) -> None:
        for name in self._under(path):
            await self.step("remove")
            self.files.pop(name, None)

    def exists(self, path: str) -> bool:
        return bool(self._under(path))

    def size_bytes(self, path: str) -> int:
        return len(self._file(path).data)

    def list(self, path: str) -> list[str]:
        return sorted({n[len(path) + 1 :].split("/")[0] for n in self._under(path) if n != path})

    def free_bytes(self) -> int:
        return self.capacity - sum(len(file.data) for file in self.files.values())

    def database(self, path: str) -> Database:
        raise OSError("this disk has no databases")

    def local_path(self, path: str) -> Path:
        raise OSError("this disk is nowhere")
