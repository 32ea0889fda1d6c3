"""One base policy and one fork server for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.harness import make_base, running_fork_server


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that sometimes sorts six digits."""
    folder = tmp_path_factory.mktemp("base")
    make_base(folder)
    return folder


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with running_fork_server(tmp_path_factory.mktemp("fork")) as path:
        yield path
