from __future__ import annotations

from typing import cast

from peers.relay import RelayRole
from simnet.adversaries.base import Kind, beside
from simnet.compute.policy import WEIGHTS
from simnet.disk import SimulatedDisk
from simnet.extents import Symbol


class CorruptRelay(RelayRole):
    """Fetches every checkpoint and serves corrupted pieces. *Caught*: every piece is hashed; each
    attempt wastes one piece, and the relay loses its standing as a source."""

    async def run(self) -> None:
        await beside(super().run, self._corrupt, 1.0)

    async def _corrupt(self) -> None:
        disk = cast(SimulatedDisk, self._peer.node.disk)
        for key in self._peer.store.complete():
            held = self._peer.store.held(key)
            path = f"{held.folder}/{WEIGHTS}" if held is not None else ""
            if held is not None and disk.exists(path):
                disk.put(path, 0, Symbol("rubbish", 0, disk.size_bytes(path)))


KIND = Kind(CorruptRelay, caught_by="shardcast.piece_refused")
