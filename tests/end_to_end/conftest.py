"""One base policy and one fork server for all end-to-end tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.harness import ENVIRONMENT, REPOSITORY

PRELOAD = (
    "torch",
    "transformers.models.qwen2.modeling_qwen2",
    "peers.trainer.service",
    "peers.inference.engine_service",
    "peers.validator.prefill",
)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that sorts six digits now and then, so that rewards differ within groups."""
    import torch

    from peers.environments import load
    from peers.policy.demo import make_policy
    from peers.trainer.sft import Warmup, warm_up

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base")
    make_policy(folder, seed=0)
    warm_up(folder, load(*ENVIRONMENT), 0, Warmup(accuracy=0.05))
    return folder


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket of a process that has torch imported, for the peers' children to fork off."""
    path = tmp_path_factory.mktemp("fork") / "socket"
    command = [sys.executable, "-m", "swarm.world.fork_server", "--socket", str(path)]
    with subprocess.Popen(
        [*command, "--preload", ",".join(PRELOAD)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield path
        finally:
            process.kill()
