"""The quota that a person sets reaches the disk, which keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from swarm.errors import DiskFullError
from swarm.node.local import open_node
from swarm.settings import PeerSettings

QUOTA = 1_000_000


@pytest.mark.wall_clock
async def test_a_peer_writes_no_more_than_its_quota(tmp_path: Path) -> None:
    settings = PeerSettings(
        role=["bootstrap"],
        listen=["/ip4/127.0.0.1/tcp/0"],
        home=str(tmp_path / "home"),
        quota_bytes=QUOTA,
    )
    with trio.fail_after(30):
        async with open_node(settings, events_sink=lambda event: None) as node:
            await node.disk.write("some", bytes(QUOTA // 4))
            with pytest.raises(DiskFullError, match="quota"):
                await node.disk.write("more", bytes(QUOTA))
