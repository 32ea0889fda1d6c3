"""The libraries that average, and the Pythons that have them, under a home in `backends/`.

`swarm backend install` makes them. Imports nothing of the libraries."""

from pathlib import Path

from peers.engines.installed import CHILD_NEEDS, Recipe, python_of, why_unusable
from swarm.errors import UserError

SERVICES = {"hivemind": "peers.outer.backends.hivemind_service:HivemindService"}
"""The service of each library's child."""

RECIPES = {
    "hivemind": Recipe(
        name="hivemind",
        steps=(("torch==2.13.0",), ("hivemind==1.1.12", *CHILD_NEEDS)),
        check=("-m", "peers.outer.backends.selftest", "hivemind"),
        disk_bytes=6 << 30,
        kind="backend",
    )
}


def recipe_of(name: str) -> Recipe:
    """The recipe of a backend; raises `UserError` for an unknown one."""
    if name not in RECIPES:
        raise UserError(
            f"backend {name!r} cannot be installed; there are: {', '.join(sorted(RECIPES))}"
        )
    return RECIPES[name]


def interpreter_for(name: str, home: Path) -> Path:
    """The Python that has a backend; raises `UserError` when it is missing or half made."""
    recipe = recipe_of(name)
    problem = why_unusable(recipe, home)
    if problem is not None:
        raise UserError(problem)
    return python_of(recipe.folder(home))
