"""Installing `verifiers`, and packages for it, in an environment of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from peers.engines.install import install as install_recipe
from peers.engines.install import pip
from peers.engines.installed import Installed
from peers.environments.verifiers.installed import recipe_of
from swarm.errors import UserError


def install(
    version: str, packages: Sequence[str], home: Path, say: Callable[[str], None]
) -> Installed:
    """Make the environment of a version of `verifiers`, or finish it, and add packages.

    Packages get the versions of everything that the environment already has. Raises `UserError`.
    """
    recipe = recipe_of(version)
    for package in packages:
        if not package[:1].isalnum() and not Path(package).exists():
            raise UserError(
                f"--package {package!r} is no package; write one like marble-v1==0.1.0, or the "
                "path of a wheel or folder"
            )
    made = install_recipe(recipe, home, say)
    for package in packages:
        say(f"installing {package}")
        pip(recipe.folder(home), "install", package, *recipe.requirements)
    return made
