"""A trainer of two ranks, started by `torchrun`, in a tiny run; also the death of a rank."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from tests.end_to_end.harness import STEP_SECONDS, Swarm, swarm
from tests.end_to_end.ledgers import check_accounts, check_nobody_was_wronged

NAMES = ["bootstrap", "relay", "trainer", "validator", "inference-1"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def as_ranks(peers: Swarm) -> None:
    """Set the trainer's command to `torchrun --nproc-per-node 2 -m swarm.peer --role trainer …`."""
    trainer = peers["trainer"]
    python, _, module, *flags = trainer.command
    trainer.command = [python, "-m", *TORCHRUN, module, *flags]
    trainer.environment = {"OMP_NUM_THREADS": "1"}


def children(parent: int) -> dict[int, bytes]:
    """Return the command lines of the child processes of `parent`."""
    found = {}
    for entry in sorted(Path("/proc").iterdir()):
        if entry.name.isdigit():
            with suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return found


def still_there(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_two_ranks_train_are_killed_and_go_on(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        steps = 6
        settings = {"trainer": {"starved_seconds": 20.0}}  # rollouts may be lost with the trainer
        async with swarm(
            tmp_path, base, fork_server, names=NAMES, steps=steps, settings=settings
        ) as peers:
            as_ranks(peers)
            trainer = peers["trainer"]
            await peers.start()
            await trainer.says("trainer.checkpoint_published", step=3, seconds=3 * STEP_SECONDS)
            state = trainer.home / "trainer/states/0-2"
            assert not state.exists() or len(list(state.glob("*.safetensors"))) == 2

            ranks = children(trainer.pid)
            (follower,) = (pid for pid, command in ranks.items() if b"trainer.follower" in command)
            os.kill(follower, signal.SIGKILL)
            assert await trainer.ended(60) != 0
            said = "\n".join(trainer.complaints)
            assert re.search(r"rank\s*: 1", said) and "SIGKILL" in said, said
            assert not still_there(ranks)

            since = len(trainer.events)
            trainer.start(peers.nursery, "--resume")
            await trainer.says("trainer.step_repeated", since=since, seconds=STEP_SECONDS, step=2)
            await peers.complete(steps * STEP_SECONDS)
            assert await trainer.ended(60) == 0
            check_nobody_was_wronged(check_accounts(peers))

    trio.run(main)
