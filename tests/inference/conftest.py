"""The policy that tests of workers generate with."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.engines import demo


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    demo.make_policy(folder, seed=1)
    return folder
