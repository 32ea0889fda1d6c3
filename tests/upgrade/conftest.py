"""What tests of several builds share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import base, fork_server
from tests.upgrade.older import NoOlderBuild, older_build

__all__ = ["base", "fork_server"]


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of an older build; skips the test without one."""
    try:
        return older_build(tmp_path_factory.mktemp("older"))
    except NoOlderBuild as error:
        pytest.skip(str(error))
