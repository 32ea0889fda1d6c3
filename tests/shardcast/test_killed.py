"""kill -9 of a real peer, on real sockets and files, while it fetches and applies deltas."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from swarm.wire.messages import Checkpoint
from swarm.world.compute import LocalCompute
from tests.shardcast.fetching_peer import Errand
from tests.shardcast.harness import Peer, real_peer
from tests.shardcast.test_chain import Files, policies, publish

pytestmark = pytest.mark.slow

Line = dict[str, Any]
NEWEST = 3


async def life(
    home: Path, trainer: Peer, checkpoint: Checkpoint, dies: Callable[[Line], bool]
) -> list[Line]:
    """Start the peer, and kill it at the line that `dies`, if it comes; what it said."""
    errand = Errand(
        checkpoint=checkpoint,
        peer=trainer.transport.peer_id,
        addresses=list(trainer.transport.addresses()),
        bulk_addresses=list(trainer.transport.bulk_addresses()),
        delta_bytes_per_call=1,
    )
    command = [sys.executable, "-m", "tests.shardcast.fetching_peer", str(home)]
    said: list[Line] = []
    async with trio.open_nursery() as nursery:
        run = partial(
            trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False
        )
        process: trio.Process = await nursery.start(run)
        assert process.stdin is not None and process.stdout is not None
        await process.stdin.send_all(msgspec.json.encode(errand) + b"\n")
        rest = b""
        async for chunk in process.stdout:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in map(json.loads, lines):
                said.append(line)
                if dies(line):
                    os.kill(process.pid, signal.SIGKILL)
                else:
                    await process.stdin.send_all(b"\n")
    assert process.returncode in (0, -signal.SIGKILL)
    assert (said[-1]["what"] == "done") == (process.returncode == 0)
    return said


def same(home: Path, step: int, files: Files) -> bool:
    folder = home / f"checkpoints/0-{step}"
    return all((folder / name).read_bytes() == data for name, data in files.items())


def found(said: list[Line], step: int, delta: bool) -> Line | None:
    """What it found of a checkpoint when it started."""
    of = [line for line in said if line["what"] == "found"]
    return next((line for line in of if (line["step"], line["delta"]) == (step, delta)), None)


class At:
    """Dies at the nth piece that is put into its place."""

    def __init__(self, count: int, *, delta: bool) -> None:
        self.left = count
        self.delta = delta

    def __call__(self, line: Line) -> bool:
        self.left -= line["what"] == "piece" and line["delta"] == self.delta
        return self.left == 0


def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """In the middle of a delta, between two, in the middle of making pieces from the chain, and at
    moments of chance; the peer gets on each time, and nothing half made counts as a policy."""
    files = policies(NEWEST + 1, share=0.4, megabytes=16)
    home = tmp_path / "worker"
    chance = random.Random(1)

    async def main() -> None:
        trainer_home = tmp_path / "trainer"
        slowly = real_peer(1, trainer_home, compute=LocalCompute(), uplink_bytes_per_second=8e6)
        async with slowly as trainer:
            checkpoints = [await publish(trainer, step, made) for step, made in enumerate(files)]
            wanted = trainer.store.held((0, NEWEST))
            assert wanted is not None and len(wanted.manifest.deltas) == NEWEST
            first = await life(home, trainer, checkpoints[0], lambda line: False)
            assert first[-1]["what"] == "done"

            live = partial(life, home, trainer, checkpoints[NEWEST])
            await live(At(2, delta=True))
            said = await live(At(2, delta=True))
            part = found(said, 1, delta=True)
            assert part is not None and 0 < part["pieces"] < part["pieces_all"]
            await live(lambda line: line["what"] == "complete" and line["step"] == 2)
            said = await live(At(5, delta=False))
            whole = found(said, 2, delta=True)
            assert whole is not None and whole["complete"]
            for _ in range(3):
                pieces = chance.randrange(2, 6)
                said = await live(At(pieces, delta=False))
                half = found(said, NEWEST, delta=False)
                assert half is not None and not half["complete"]
                assert 0 < half["pieces"] < half["pieces_all"]
                assert said[-1]["what"] == "piece"
            said = await live(lambda line: False)
            assert said[-1]["what"] == "done"
            (applied,) = [line for line in said if line["what"] == "applied"]
            assert 0 < applied["bytes_made"] < wanted.manifest.total_bytes
            # What was made or fetched in an earlier life was neither made nor fetched again.
            assert not [line for line in said if line["what"] == "piece" and line["delta"]]

    trio.run(main)
    assert same(home, NEWEST, files[NEWEST]) and same(home, 0, files[0])
    left = sorted(path.name for path in (home / "checkpoints").iterdir())
    assert left == sorted(
        ["0-0", f"0-{NEWEST}", *(f"0-{step}.delta" for step in range(1, NEWEST + 1))]
    )
