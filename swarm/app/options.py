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
        help="Multiaddr of a peer in the network; repeatable. Default: the address that a "
        "peer with the default --home last joined through.",
    ),
]
WhichRun = Annotated[
    str | None, typer.Option("--run", help="Id or name of the run, if there are several.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
TokenizerFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder with tokenizer.json and config.json; default: the model, if it is a folder."
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
