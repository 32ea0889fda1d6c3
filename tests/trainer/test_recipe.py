from __future__ import annotations

import pytest

from benchmarks.recipe import run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_recipe_learns_without_a_network(seed: int) -> None:
    result = run(seed, steps=250)
    assert 0.1 <= result["sampled_accuracy_before"] <= 0.4
    assert result["sampled_accuracy_after"] >= 0.80
    assert result["engine_log_probability_difference"] < 1e-4
