"""A stranger whose contributions are noise: `… <peer's flags>`. All else of it is unchanged."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import torch
import typer

from peers.outer.artifacts import Artifacts
from peers.outer.learning.contribution import FILE, MAGIC, Header, write
from swarm.commands.peer import peer
from swarm.shardcast.held import Held

publish = Artifacts.publish_contribution


async def publish_noise(self: Artifacts, folder: str, base: bytes, round: int) -> Held:
    path = Path(self.local(folder)) / FILE
    raw = path.read_bytes()[len(MAGIC) :]
    (length,) = struct.unpack_from("<I", raw)
    header = msgspec.msgpack.decode(raw[4 : 4 + length], type=Header)
    write(path, header, lambda _, piece: 1e-3 * torch.randn(piece.stop - piece.start))
    return await publish(self, folder, base, round)


if __name__ == "__main__":
    Artifacts.publish_contribution = publish_noise  # type: ignore[method-assign]
    typer.run(peer)
