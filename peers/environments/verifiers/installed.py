"""The Pythons that have a library of environments: virtual environments under a home, in
`environments/`.

`swarm environment install verifiers` makes one per version of the library: packages of the older
interface need another than those of the 1.x interface. `swarm environment install openenv` makes
one for servers of OpenEnv, which import nothing of Swarm."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from peers.engines.install import install as install_recipe
from peers.engines.install import pip
from peers.engines.installed import Installed, Recipe, python_of, why_unusable
from swarm.data import beside
from swarm.errors import UserError
from swarm.world.process import HOME_VARIABLE, INSTALLED_VARIABLE

DEFAULT_HOME = Path("~/.swarm")


class _Data(msgspec.Struct):
    child_needs: tuple[str, ...]
    verifiers: dict[str, Recipe]
    openenv: dict[str, Recipe]


_DATA = beside(__file__, _Data)

CHILD_NEEDS = _DATA.child_needs
"""The packages that the child imports; the versions are those of pyproject.toml."""

RECIPES = {
    version: replace(each, steps=(*each.steps, CHILD_NEEDS))
    for version, each in _DATA.verifiers.items()
}

LATEST = next(iter(RECIPES))

LIBRARIES = {"verifiers": RECIPES, "openenv": _DATA.openenv}
"""Recipes by library and version, the default first."""


def recipe_of(version: str, library: str = "verifiers") -> Recipe:
    """The recipe of a library's version; raises `UserError` for an unknown one."""
    if library not in LIBRARIES:
        raise UserError(
            f"library {library!r} cannot be installed; there are: {', '.join(LIBRARIES)}"
        )
    known = LIBRARIES[library]
    if (found := known.get(version or next(iter(known)))) is None:
        raise UserError(f"{library} {version!r} cannot be installed; there are: {', '.join(known)}")
    return found


def install_command(version: str) -> str:
    """The command that installs a version of `verifiers`, for error messages."""
    return recipe_of(version).command(homes()[0])


def homes() -> list[Path]:
    """The homes where an installation is looked for: the peer's, then the user's default."""
    given, installed = os.environ.get(HOME_VARIABLE), os.environ.get(INSTALLED_VARIABLE)
    found = [Path(installed).parent] if installed else [Path(given)] if given else []
    return list(dict.fromkeys([*found, DEFAULT_HOME.expanduser()]))


def interpreter_for(version: str) -> Path:
    """The Python that has this `verifiers`; raises `UserError` if it is missing or half made."""
    recipe = recipe_of(version)
    problems = []
    for home in homes():
        if (problem := why_unusable(recipe, home)) is None:
            return python_of(recipe.folder(home))
        problems.append(problem)
    present = [home for home in homes() if recipe.folder(home).exists()]
    raise UserError(problems[homes().index(present[0])] if present else problems[0])


PACKAGE = re.compile(r"[A-Za-z0-9]([\w.-]*(\[[\w,. -]*\])?\s*([=<>!~@;].*)?|[\w+]*://.*)")
"""A name, perhaps with extras and versions, or an address."""


def check_packages(packages: Sequence[str]) -> None:
    """Raise `UserError` for what pip would take for an option, or for no package."""
    for package in packages:
        if not PACKAGE.fullmatch(package) and not (package and Path(package).exists()):
            raise UserError(
                f"--package {package!r} is no package; write one like marble-v1==0.1.0, or the "
                "path of a wheel or folder"
            )


def install(
    recipe: Recipe, packages: Sequence[str], home: Path, say: Callable[[str], None]
) -> Installed:
    """Make or finish a library's environment, and add packages to it; raises `UserError`."""
    check_packages(packages)
    made = install_recipe(recipe, home, say)
    for package in packages:
        say(f"installing {package}")
        pip(recipe.folder(home), "install", package, *recipe.requirements)
    return made
