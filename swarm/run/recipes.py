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
    },
    "prime": {
        "environments": {"accuracy_min": 0.2, "accuracy_max": 0.8},
        "objective": {
            "name": "grpo",
            "epsilon": 0.2,
            "advantage": "rloo",
            "kl_coefficient": 0.0,
            "entropy_coefficient": 0.001,
            "process": {"weight": 1.0, "beta": 0.05, "learning_rate": 1e-6},
        },
        "optimiser": {
            "learning_rate": 5e-7,
            "gradient_norm_max": 1.0,
            "warmup_steps": 0,
            "learning_rate_schedule": "constant",
            "optimiser_steps": 1,
        },
        "schedule": {"groups_per_step": 256},
        "sampling": {"temperature": 1.0, "group_size": 4},
        "filters": {"fill": "refill"},
    },
}
"""Tables of a manifest by recipe; `environments` holds for each of a run's. intellect-2: arXiv
2505.07291, and for AdamW's betas and weight decay, which the paper does not give, the configuration
of the published code (zeroband). prime: arXiv 2502.01456, and for the entropy coefficient and the
gradient's norm its published code (verl's recipe of that name)."""


ADAPTER = {"optimiser": {"learning_rate": 1e-4}}
"""Values of a run that trains an adapter. At a whole model's rate of 3e-7 an entry of B, which
begins at 0, is below 3e-5 after 100 steps."""


def apply_recipe(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A run's table with the values of its recipe, and those for an adapter if it trains one,
    wherever it sets none; raises `UserError`."""
    filled = _with_recipe(dict(table), where)
    adapter = filled.get("adapter")
    if isinstance(adapter, Mapping) and adapter.get("rank"):
        filled = _fill({"optimiser": {}, **filled}, ADAPTER)
    return filled


def _with_recipe(table: dict[str, Any], where: str) -> dict[str, Any]:
    name = table.pop("recipe", None)
    if name is None:
        return table
    recipe = RECIPES.get(name) if isinstance(name, str) else None
    if recipe is None:
        known = ", ".join(RECIPES)
        raise UserError(f"{where}: recipe is {name!r}; the recipes are: {known}")
    values = dict(recipe)
    of_each = values.pop("environments", {})
    entries = table.get("environments")
    if isinstance(entries, list):
        table["environments"] = [_fill(entry, of_each) for entry in entries]
    filled: dict[str, Any] = _fill(table, values)
    return filled


def _fill(given: Any, values: Mapping[str, Any]) -> Any:
    """A table with these values, also of tables in it, wherever it sets none."""
    if not isinstance(given, Mapping):  # refused later, with its own sentence
        return given
    filled = {**values, **given}
    for name, value in values.items():
        if isinstance(value, Mapping):
            filled[name] = _fill(filled[name], value)
    return filled
