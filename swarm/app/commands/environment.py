"""`swarm environment`: what a run trains on."""

from __future__ import annotations

import typer

from swarm.app.commands import environment_install

app = typer.Typer(help="Environments: what a run trains on.", no_args_is_help=True)
environment_install.register(app)
