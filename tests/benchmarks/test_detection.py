"""The bound on a worker's choice is never below the number of texts that stay unseen."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.detection import bits, log_choices


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.floats(1e-4, 0.5), st.floats(0.05, 3))
def test_the_bound_is_above_the_count(seed: int, honest_margin: float, margin_max: float) -> None:
    perturbed = 2 * torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    margins = (perturbed.amax(-1, keepdim=True) - perturbed).tolist()
    unseen = sum(
        max(chosen) <= margin_max and sum(min(m, 1.0) for m in chosen) <= honest_margin * 5
        for chosen in itertools.product(*margins)
    )
    bound = bits(log_choices(perturbed, margin_max), 5, honest_margin)
    assert bound >= math.log2(unseen) - 1e-6


def test_no_near_ties_leave_no_choice() -> None:
    perturbed = torch.tensor([[0.0, 9.0], [9.0, 0.0]])
    assert bits(log_choices(perturbed, 1.0), 2, 1e-6) < 1e-4
