from __future__ import annotations

import pytest

from swarm.shardcast import limits


@pytest.fixture(autouse=True)
def _small_checkpoints_have_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the tests' tiny checkpoints like large ones."""
    monkeypatch.setattr(limits, "SMALL_BYTES", 0)
