from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peers.engines.demo import make_policy

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy with random weights."""
    folder = tmp_path_factory.mktemp("base") / "policy"
    make_policy(folder, seed=3)
    return folder
