"""Cost model of deltas between checkpoints."""

import trio

from simnet.compute.setting import WEIGHTS, Setting
from simnet.extents import Symbol
from swarm.shardcast.jobs import DeltaEncoded, EncodeDelta, MakePieces, PiecesMade

_LEADS_TO = " -> "
"""Separator of two contents' names in the name of the delta from the first to the second."""


class DeltaModel:
    """Cost model of `swarm.shardcast.delta.DeltaService`, for weights. A delta is a symbol, too:
    its name gives its source and its result."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._disk = setting.disk

    async def encode(self, job: EncodeDelta) -> DeltaEncoded:
        old, weights = self._weights(job.base), self._weights(job.new)
        await self._work(weights.size_bytes)
        size = int(weights.size_bytes * self._setting.workload.delta_share)
        words = weights.size_bytes // 2
        if not 0 < size <= job.limit_bytes:
            return DeltaEncoded(size_bytes=0, changed_words=words, words=words)
        delta = Symbol(f"{old.name}{_LEADS_TO}{weights.name}", 0, size)
        self._disk.put(self._disk.path_of(job.out), 0, delta)
        return DeltaEncoded(size_bytes=size, changed_words=size // 4, words=words)

    async def make(self, job: MakePieces) -> PiecesMade:
        name = self._weights(job.base).name
        for delta in job.deltas:
            content = self._whole(self._disk.path_of(delta))
            old, _, new = content.name.partition(_LEADS_TO)
            if old != name:
                raise ValueError(f"{delta} changes something else than its base")
            name = new
        made = []
        for piece in job.pieces:
            content = Symbol(name, piece.offset, piece.size_bytes)
            await self._work(piece.size_bytes)
            if piece.name == WEIGHTS and content.digest() == piece.digest:
                path = f"{self._disk.path_of(job.target)}/{piece.name}"
                self._disk.put(path, piece.offset, content)
                made.append(piece.index)
        return PiecesMade(made=made)

    def _weights(self, folder: str) -> Symbol:
        return self._whole(f"{self._disk.path_of(folder)}/{WEIGHTS}")

    def _whole(self, path: str) -> Symbol:
        content = self._disk.symbol(path, 0, self._disk.size_bytes(path))
        if content is None:
            raise ValueError(f"{path} is not whole")
        return content

    async def _work(self, size_bytes: int) -> None:
        await trio.sleep(size_bytes / self._setting.hardware.delta_bytes_per_second)
