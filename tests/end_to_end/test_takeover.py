"""A trainer and its disk are lost; its standby goes on with the run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import trio

from tests.end_to_end.harness import REPOSITORY, STEP_SECONDS, Swarm, swarm

NAMES = ["bootstrap", "trainer", "trainer-2", "validator", "inference-1", "inference-2"]
OFTEN = {"standby_minutes": 0.01}


async def takeover(peers: Swarm, *arguments: str) -> tuple[int, str]:
    """Type `swarm trainer takeover` on the standby's machine; return exit status and output."""
    done = await trio.run_process(
        [
            *(sys.executable, "-m", "swarm.app.main", "trainer", "takeover"),
            *("--home", str(peers["trainer-2"].home), "--bootstrap", peers["bootstrap"].multiaddr),
            *arguments,
        ],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        cwd=REPOSITORY,
    )
    return done.returncode, done.stdout.decode() + done.stderr.decode()


@pytest.mark.slow
def test_a_standby_takes_over_from_a_trainer_that_lost_its_disk(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        steps = 12
        settings = {"trainer": OFTEN, "trainer-2": OFTEN}
        async with swarm(
            tmp_path, base, fork_server, names=NAMES, steps=steps, settings=settings
        ) as peers:
            await peers.start()
            trainer, standby = peers["trainer"], peers["trainer-2"]
            bundle = await standby.says("standby.bundle_received")
            await trainer.says("trainer.checkpoint_published", step=3)
            await trainer.kill()
            shutil.rmtree(trainer.home)
            status, said = await takeover(peers)
            assert status == 2 and "was heard" in said, said
            receipts = len(peers["inference-1"].heard("inference.receipt"))
            status, said = await takeover(peers, "--force")
            assert status == 0 and "the trainer before is a standby now" in said, said
            unpacked = await standby.says("standby.unpacked")
            assert unpacked["step"] >= bundle["step"]
            over = await standby.says("trainer.run_complete", seconds=steps * STEP_SECONDS)
            assert over["steps"] == steps
            assert len(peers["inference-1"].heard("inference.receipt")) > receipts
            assert await standby.ended(30) == 0

    trio.run(main)
