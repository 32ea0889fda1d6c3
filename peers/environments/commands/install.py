"""`swarm environment install`: libraries of environments, each under a Python of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.errors import UserError
from swarm.terminal.exit import exits

VERIFIERS = "verifiers"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("install")(install_command)


@exits
def install_command(
    library: Annotated[str, typer.Argument(help="verifiers.")],
    version: Annotated[
        str, typer.Option(help="Version of the library; 0.3.1 plays `load_environment` packages.")
    ] = "",
    package: Annotated[
        list[str] | None, typer.Option(help="A package of environments to add; may be repeated.")
    ] = None,
    home: Annotated[
        Path, typer.Option(help="Folder of keys and state of the peer that uses it.")
    ] = Path("~/.swarm"),
) -> None:
    """Make the Python of a library of environments in the home, or finish it, and add packages."""
    from peers.environments.verifiers.install import install
    from peers.environments.verifiers.installed import LATEST, recipe_of

    if library != VERIFIERS:
        raise UserError(f"library {library!r} cannot be installed; there is: {VERIFIERS}")
    home, version = home.expanduser().absolute(), version or LATEST
    made = install(version, package or [], home, lambda line: print(line, flush=True))
    versions = ", ".join(f"{each} {found}" for each, found in made.versions.items())
    print(f"verifiers is installed in {recipe_of(version).folder(home)}: {versions}")
