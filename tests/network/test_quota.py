"""The quota that a person sets reaches both who keep it: the disk, and the checkpoint store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from swarm.errors import DiskFullError
from swarm.gossip.topics import RUN, WORK
from swarm.node.local import open_node
from swarm.node.run_node import RunNode
from swarm.run.run import Run
from swarm.settings import PeerSettings
from swarm.transport import Source
from tests.ledger.harness import ALICE, TRAINER, Swarm
from tests.shardcast.harness import announcement

QUOTA = 1_000_000


def test_a_peer_writes_no_more_than_its_quota(tmp_path: Path) -> None:
    settings = PeerSettings(
        role=["bootstrap"],
        listen=["/ip4/127.0.0.1/tcp/0"],
        home=str(tmp_path / "home"),
        quota_bytes=QUOTA,
    )

    async def main() -> None:
        with trio.fail_after(30):
            async with open_node(settings, events_sink=lambda event: None) as node:
                await node.disk.write("some", bytes(QUOTA // 4))
                with pytest.raises(DiskFullError, match="quota"):
                    await node.disk.write("more", bytes(QUOTA))

    trio.run(main)


def test_a_peer_of_a_run_fetches_no_more_than_its_quota(tmp_path: Path) -> None:
    """Whatever its disk would take."""
    swarm = Swarm(tmp_path)

    async def main() -> None:
        async with swarm.apart(TRAINER) as trainer, swarm.apart(ALICE) as validator:
            trainer.node.transport.serve_bulk(trainer.run_node.blobs)
            await trainer.node.disk.write("made/model.safetensors", bytes(QUOTA + 1))
            held = await trainer.run_node.store.publish("made", 0, 0)
            for quota in (QUOTA, 2 * QUOTA):
                settings = PeerSettings(role=["observer"], quota_bytes=quota)
                node = replace(validator.node, settings=settings)
                part = RunNode(node, Run(swarm.manifest), (RUN, WORK))
                fetch = part.policies.fetcher.fetch(
                    announcement(held), lambda: [Source(trainer.node.peer_id)]
                )
                if quota > QUOTA:
                    await fetch
                else:
                    with pytest.raises(DiskFullError, match="left of this peer's quota"):
                        await fetch

    trio.run(main)
