"""`swarm engine`: engines that run in an environment of their own."""

from pathlib import Path

import typer

from swarm.terminal.exit import exits
from swarm.terminal.options import Home, explained

app = typer.Typer(help="Engines that run in an environment of their own.", no_args_is_help=True)


@app.command("install")
@exits
@explained(__file__)
def install_command(name: str, home: Home = Path("~/.swarm")) -> None:
    """Make an engine's environment in the home, or finish it, and check that the engine works."""
    from peers.engines.install import install, recipe_of

    recipe, home = recipe_of(name), home.expanduser().absolute()
    made = install(recipe, home, lambda line: print(line, flush=True))
    versions = ", ".join(f"{each} {version}" for each, version in made.versions.items())
    print(f"{name} is installed in {recipe.folder(home)}: {versions}")
    print(f"peers with this home use it with: --engine {recipe.engine}")
