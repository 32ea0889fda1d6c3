"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm import __version__

Bootstrap = Annotated[
    list[str] | None,
    typer.Option(
        "--bootstrap",
        help="Multiaddr of a peer that knows the network; repeatable. Without it, the one that a "
        "peer with the default --home last joined through.",
    ),
]
WhichRun = Annotated[
    str | None, typer.Option("--run", help="Which run, if the peer knows several: id or name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
TokenizerFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder with tokenizer.json and config.json; the model's, if it is a folder here."
    ),
]


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"swarm {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
]
"""An option of every command line."""
