from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.studies import Curve, Variant, band, learn
from peers.demo.warmup import prepare_base


def test_a_policy_that_was_twice_as_good_has_collapsed() -> None:
    assert Curve(reward=[0.1, *[0.8] * 20, *[0.1] * 10]).collapsed
    assert not Curve(reward=[0.1] * 5 + [0.8] * 20).collapsed
    assert not Curve(reward=[0.2, 0.1, 0.2]).collapsed


def test_a_band_is_mean_least_and_most_over_seeds() -> None:
    drawn = band([[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]], points=2)
    assert drawn == {
        "step": [0.0, 2.0],
        "mean": [1.0, 3.0],
        "low": [0.0, 2.0],
        "high": [2.0, 4.0],
    }


@pytest.mark.slow
def test_staler_rollouts_weigh_less_evenly(tmp_path: Path) -> None:
    prepare_base(tmp_path / "base", 0)
    shares = []
    for staleness in (0, 6):
        curve = learn(tmp_path / "base", 0, Variant(staleness=staleness), 14)
        shares.append(min(curve.effective_share))
    assert shares[0] == pytest.approx(1)
    assert shares[1] < 0.9
