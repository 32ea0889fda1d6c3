"""A disk for the tests that need one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transport.harness import FolderDisk


@pytest.fixture
def disk(tmp_path: Path) -> FolderDisk:
    return FolderDisk(tmp_path / "disk")
