"""Values that a run's TOML file leaves to its recipe or to its adapter."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.run.recipes import apply_recipe


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({"adapter": {"rank": 16}}, 1e-4),
        ({"adapter": {"rank": 16}, "optimiser": {"warmup_steps": 3}}, 1e-4),
        ({"adapter": {"rank": 16}, "optimiser": {"learning_rate": 2e-5}}, 2e-5),
        ({"adapter": {"rank": 16}, "recipe": "intellect-2"}, 3e-7),
        ({"adapter": {"rank": 0}}, None),
        ({}, None),
    ],
)
def test_an_adapter_has_a_learning_rate_of_its_own(
    given: dict[str, Any], rate: float | None
) -> None:
    optimiser = apply_recipe(given, "run.toml").get("optimiser", {})
    assert optimiser.get("learning_rate") == rate
