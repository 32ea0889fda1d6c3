from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recipe import run
from peers.trainer.warmup import prepare_base


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_recipe_learns_without_a_network(seed: int) -> None:
    result = run(seed, steps=250)
    assert 0.15 <= result["sampled_accuracy_before"] <= 0.3
    assert result["sampled_accuracy_after"] >= 0.80
    assert result["engine_log_probability_difference"] < 1e-4


@pytest.mark.slow
def test_the_same_seed_prepares_the_same_base(tmp_path: Path) -> None:
    measured = [
        prepare_base(tmp_path / name, seed) for name, seed in (("a", 2), ("b", 2), ("c", 3))
    ]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "c")]
    assert weights[0] == weights[1] != weights[2]
    assert measured[0] == measured[1]
    assert all(0.15 <= each.sampled <= 0.3 for each in measured)
