from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.studies import Variant, learn
from peers.demo.warmup import prepare_base


@pytest.mark.slow
def test_staler_rollouts_weigh_less_evenly(tmp_path: Path) -> None:
    prepare_base(tmp_path / "base", 0)
    shares = []
    for staleness in (0, 6):
        curve = learn(tmp_path / "base", 0, Variant(staleness=staleness), 14)
        shares.append(min(curve.effective_share))
    assert shares[0] == pytest.approx(1)
    assert shares[1] < 0.9
