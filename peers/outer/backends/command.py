"""`swarm backend`: other libraries by which trainers can average, each under its own Python."""

from pathlib import Path

import typer

from swarm.terminal.exit import exits
from swarm.terminal.options import Home, explained

app = typer.Typer(help="Other libraries by which trainers can average.", no_args_is_help=True)


@app.command("install")
@exits
@explained(__file__)
def install_command(name: str, home: Home = Path("~/.swarm")) -> None:
    """Make a backend's environment in the home, or finish it, and check that it averages."""
    from peers.engines.install import install
    from peers.outer.backends.installed import recipe_of

    recipe, home = recipe_of(name), home.expanduser().absolute()
    made = install(recipe, home, lambda line: print(line, flush=True))
    versions = ", ".join(f"{each} {made.versions[each]}" for each in ("torch", name))
    print(f"{name} is installed in {recipe.folder(home)}: {versions}")
    print(f"trainers use it with: swarm train --backend {name}")
