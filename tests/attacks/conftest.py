"""A trained policy and what judges its work, made once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from peers.validator.inspector import InspectorService
from tests.attacks import models
from tests.background import Ask, in_background

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return models.train(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="session")
def arena(
    policies: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[models.Arena]:
    with ExitStack() as stack:

        def ask_of(inspector: InspectorService) -> Ask:
            return stack.enter_context(in_background(inspector.run))

        yield models.arena(policies, tmp_path_factory.mktemp("arena"), ask_of)
