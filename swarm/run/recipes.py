"""Recipes: published settings by name, for `recipe = NAME`, or a list of names, in a run's TOML
file. Of two recipes the first wins, as the file does over both."""

from collections.abc import Mapping
from typing import Any

from swarm.data import beside
from swarm.errors import UserError

RECIPES = beside(__file__, dict[str, dict[str, dict[str, Any]]])
"""Tables of a manifest by recipe, from `recipes.toml`; `environments` holds for each of a run's."""


ADAPTER = {"optimiser": {"learning_rate": 1e-4}}
"""Values of a run that trains an adapter. At a whole model's rate of 3e-7 an entry of B, which
begins at 0, is below 3e-5 after 100 steps."""


def apply_recipe(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A run's table with the values of its recipes, and those for an adapter if it trains one,
    wherever it sets none; raises `UserError`."""
    filled = _with_recipes(dict(table), where)
    adapter = filled.get("adapter")
    if isinstance(adapter, Mapping) and adapter.get("rank"):
        filled = _fill({"optimiser": {}, **filled}, ADAPTER)
    return filled


def _with_recipes(table: dict[str, Any], where: str) -> dict[str, Any]:
    named = table.pop("recipe", [])
    for name in named if isinstance(named, list) else [named]:
        if not isinstance(name, str) or name not in RECIPES:
            known = ", ".join(RECIPES)
            raise UserError(f"{where}: recipe is {name!r}; the recipes are: {known}")
        values = dict(RECIPES[name])
        of_each = values.pop("environments", {})
        entries = table.get("environments")
        if isinstance(entries, list):
            table["environments"] = [_fill(entry, of_each) for entry in entries]
        table = _fill(table, values)
    return table


def _fill(given: Any, values: Mapping[str, Any]) -> Any:
    """A table with these values, also of tables in it, wherever it sets none."""
    if not isinstance(given, Mapping):  # refused later, with its own sentence
        return given
    filled = {**values, **given}
    for name, value in values.items():
        if isinstance(value, Mapping):
            filled[name] = _fill(filled[name], value)
    return filled
