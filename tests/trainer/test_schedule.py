from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.learning.settings import learning_rate
from swarm.wire.manifest import Optimiser

NAMES = ["constant", "cosine", "linear", "wsd"]


def rates(name: Any, total: int, **fields: Any) -> list[float]:
    optimiser = Optimiser(learning_rate=1.0, learning_rate_schedule=name, **fields)
    return [learning_rate(optimiser, total, step) for step in range(total + 1)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
        ("cosine", [1, 0.96955, 0.88284, 0.75307, 0.6, 0.44693, 0.31716, 0.23045, 0.2]),
        ("wsd", [1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_each_schedule_after_its_warm_up(name: str, expected: list[float]) -> None:
    found = rates(name, 10, warmup_steps=2, final_learning_rate_share=0.2, decay_share=0.4)
    assert found[:2] == [0.5, 1]
    assert found[2:] == pytest.approx(expected, abs=1e-5)


@given(
    st.sampled_from(NAMES),
    st.integers(1, 60),
    st.integers(0, 80),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_rates_rise_once_then_never_again_and_end_at_the_share(
    name: str, total: int, warmup: int, share: float, decay: float
) -> None:
    found = rates(
        name, total, warmup_steps=warmup, final_learning_rate_share=share, decay_share=decay
    )
    after = found[warmup:]
    assert found[:warmup] == sorted(found[:warmup])
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    assert all(0 <= rate <= 1 for rate in found)
    if warmup < total:
        assert found[-1] == pytest.approx(1.0 if name == "constant" else share)
