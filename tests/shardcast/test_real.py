"""The same on real sockets and files: libp2p for streams, HTTP for pieces, folders on this disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from tests.shardcast.harness import announcement, put_folder, real_peer


@pytest.mark.wall_clock
async def test_a_chain_over_real_sockets_and_files(tmp_path: Path) -> None:
    """Trainer → relay → client, where the client knows only the relay; then all restart."""
    files = {
        "config.json": b"{}",
        "model.safetensors": random.Random(0).randbytes(3 << 20),
        "sub/notes.txt": b"x" * 1000,
    }

    def same(folder: Path) -> bool:
        return all((folder / name).read_bytes() == data for name, data in files.items())

    with trio.fail_after(30):
        async with (
            real_peer(1, tmp_path / "trainer") as trainer,
            real_peer(2, tmp_path / "relay") as relay,
            real_peer(3, tmp_path / "client") as client,
        ):
            await put_folder(trainer.disk, "made", files)
            held = await trainer.store.publish("made", 0, 0)
            checkpoint = announcement(held)
            await relay.connect(trainer)
            await client.connect(relay)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.fetcher.fetch, checkpoint, lambda: [relay.source])
                nursery.start_soon(relay.fetcher.fetch, checkpoint, lambda: [trainer.source])
            for one, home in ((relay, "relay"), (client, "client")):
                assert same(tmp_path / home / "checkpoints/0-0")
                (done,) = one.events.named("shardcast.checkpoint_complete")
                assert len(done.fields["by_source"]) == 1
        damaged = tmp_path / "client/checkpoints/0-0/model.safetensors"
        with damaged.open("r+b") as file:
            file.seek(1 << 20)
            file.write(b"!")
        async with (
            real_peer(2, tmp_path / "relay") as relay,
            real_peer(3, tmp_path / "client") as client,
        ):
            assert relay.store.complete() == [(0, 0)]
            held_again = client.store.held((0, 0))
            assert held_again is not None and len(held_again.missing()) == 1
            await client.connect(relay)
            folder = await client.fetcher.fetch(checkpoint, lambda: [relay.source])
            assert folder == "checkpoints/0-0"
            assert same(tmp_path / "client/checkpoints/0-0")
            (piece,) = client.events.named("shardcast.piece_received")
            assert piece.fields["piece"] == 1 + 4
