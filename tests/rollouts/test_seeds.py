"""What follows from a submission's seed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.rollouts.seeds import environment_of_group


@given(st.binary(min_size=32, max_size=32), st.integers(0, 1 << 20))
def test_a_single_environment_gives_every_group(seed: bytes, group: int) -> None:
    assert environment_of_group(seed, group, [0.3]) == 0


@given(
    st.binary(min_size=32, max_size=32),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=16).filter(lambda some: sum(some) > 0),
)
def test_an_environment_without_weight_is_never_drawn(seed: bytes, weights: list[float]) -> None:
    for group in range(8):
        assert weights[environment_of_group(seed, group, weights)] > 0


def test_environments_are_drawn_in_proportion_to_their_weights() -> None:
    drawn = Counter(environment_of_group(bytes(32), group, [1, 2, 5]) for group in range(4000))
    assert [drawn[index] / 4000 for index in range(3)] == pytest.approx(
        [1 / 8, 1 / 4, 5 / 8], abs=0.03
    )


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0, 2.0], [float("nan")], [float("inf")]])
def test_weights_that_are_no_shares_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="no shares"):
        environment_of_group(bytes(32), 0, weights)
