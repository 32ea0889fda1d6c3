"""A simulated disk whose changing operations can be counted, and stopped at one of them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import trio

from simnet.disk import SimulatedDisk
from simnet.extents import SimulatedSink
from swarm.world import Piece, Sink


class PowerCut(Exception):
    """The machine stopped at this operation."""


class MemoryDisk(SimulatedDisk):
    """`cut_at` = n stops the n-th changing operation."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        super().__init__(capacity_bytes=capacity, bytes_per_second=inf, sync_seconds=0.0)
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

    async def write(self, path: str, data: bytes) -> None:
        await self.step("write")
        await super().write(path, data)
        self.syncs += 1

    async def allocate(self, path: str, size_bytes: int) -> None:
        await self.step("allocate")
        await super().allocate(path, size_bytes)

    def sink(self, path: str, offset: int, size_bytes: int) -> Sink:
        return _Sink(self, path, offset, size_bytes)

    async def sync(self, path: str) -> None:
        await self.step("sync")
        self.syncs += len(self._under(path))
        await super().sync(path)

    async def rename(self, old: str, new: str) -> None:
        await self.step("rename")
        await super().rename(old, new)

    async def remove(self, path: str) -> None:
        for name in self._under(path):  # one by one, as on a real disk
            await self.step("remove")
            await super().remove(name)

    def data(self, path: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """What a file holds, without a step."""
        end = self.size_bytes(path) if size_bytes is None else offset + size_bytes
        return self._bytes(path, offset, end)

    def flip(self, path: str, at: int) -> None:
        """Flip a bit of a file."""
        self.put(path, at, bytes([self.data(path, at, 1)[0] ^ 1]))


class _Sink(SimulatedSink):
    def __init__(self, disk: MemoryDisk, path: str, offset: int, size_bytes: int) -> None:
        super().__init__(disk.put, path, offset, size_bytes)
        self._step = disk.step

    async def commit(self, piece: Piece) -> None:
        await self._step("commit")
