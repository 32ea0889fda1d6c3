from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines.families import SUPPORTED, save_random

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Two policies of a model by its name in `tests.engines.families`."""
    made: dict[str, list[Path]] = {}

    def of(family: str) -> list[Path]:
        if family not in made:
            made[family] = [tmp_path_factory.mktemp(f"{family}-{seed}") for seed in (1, 2)]
            for seed, folder in enumerate(made[family]):
                save_random(SUPPORTED[family], folder, seed + 1)
        return made[family]

    return of
