"""A run that trains adapters: real peers publish, fetch, generate with, judge and train them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from peers.engines.model import read_weights
from swarm.wire.manifest import Adapter
from tests.end_to_end.harness import swarm

ADAPTER = Adapter(rank=4, alpha=16.0)
LATE = 2
"""The policy after which a further worker joins."""


@pytest.mark.slow
def test_adapters_are_accepted_and_the_base_is_fetched_once(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        names = ["bootstrap", "trainer", "validator", "inference-1", "inference-2"]
        settings = {"inference-1": {"adapters": "unmerged"}}
        async with swarm(
            tmp_path, base, fork_server, names=names, steps=1000, adapter=ADAPTER,
            settings=settings,
        ) as peers:  # fmt: skip
            trainer, newcomer = peers["trainer"], peers["inference-2"]
            await peers.start(*names[:-1])
            await trainer.says("trainer.checkpoint_published", step=LATE)
            await peers.start("inference-2")
            for worker in peers.of_role("inference"):
                await worker.says("inference.receipt", outcome="accepted")
                assert not worker.heard("inference.receipt", outcome="refused")
            await newcomer.says("shardcast.checkpoint_removed")  # the base outlives adapters
            sizes = [event["bytes"] for event in trainer.heard("trainer.checkpoint_published")]
            assert max(sizes[1:]) < sizes[0] / 3
            fetched = [event["step"] for event in newcomer.heard("shardcast.checkpoint_complete")]
            assert fetched.count(0) == 1 and fetched[0] > 0  # an adapter says which base it needs
            for peer in (trainer, newcomer):
                assert (peer.home / "checkpoints" / "0-0" / "model.safetensors").exists()
            newest = trainer.heard("trainer.checkpoint_published")[-1]["step"]
            folder = trainer.home / "checkpoints" / f"0-{newest}"
            trained, plain = (read_weights(each) for each in (folder, base))
            moved = {name for name in plain if not trained[name].equal(plain[name])}
            assert moved and all("_proj" in name for name in moved)

    trio.run(main)
