"""Recipes: published settings of a whole run, by name, for `recipe = NAME` in a run's TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm.errors import UserError

RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "intellect-2": {
        "objective": {
            "name": "grpo",
            "epsilon": 0.2,
            "delta": 4.0,
            "kl_coefficient": 0.001,
            "entropy_coefficient": 0.0001,
            "normalise_by_std": True,
        },
        "optimiser": {
            "learning_rate": 3e-7,
            "beta1": 0.9,
            "beta2": 0.99,
            "weight_decay": 0.01,
            "gradient_norm_max": 0.1,
            "warmup_steps": 25,
            "final_learning_rate_share": 1.0,
            "optimiser_steps": 8,
        },
        "schedule": {"groups_per_step": 256, "asynchrony": 2, "old": "step_start"},
        "sampling": {"temperature": 1.0, "group_size": 16},
        "filters": {"fill": "refill"},
    }
}
"""Tables of a manifest by recipe. intellect-2: arXiv 2505.07291, and for AdamW's betas and weight
decay, which the paper does not give, the configuration of the published code (zeroband)."""


def apply_recipe(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A run's table with the values of its recipe wherever it sets none; raises `UserError`."""
    table = dict(table)
    name = table.pop("recipe", None)
    if name is None:
        return table
    recipe = RECIPES.get(name) if isinstance(name, str) else None
    if recipe is None:
        known = ", ".join(RECIPES)
        raise UserError(f"{where}: recipe is {name!r}; the recipes are: {known}")
    for section, values in recipe.items():
        given = table.get(section, {})
        if isinstance(given, Mapping):  # else the table is refused with its own sentence
            table[section] = {**values, **given}
    return table
