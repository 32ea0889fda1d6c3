"""`swarm id`: the id of the peer in a home."""

from pathlib import Path
from typing import Annotated

import typer

from swarm.terminal.exit import exits


@exits
def show_id(
    home: Annotated[Path, typer.Argument(help="Folder of a peer's keys and state.")],
    change: Annotated[
        bool, typer.Option("--change", help="Let the home become that of another peer.")
    ] = False,
) -> None:
    """Print the id of the peer in a home, and make its key if it has none."""
    from swarm.wire.identity import home_identity

    print(home_identity(home, change=change).peer_id)
