"""`swarm id`: the id of the peer in a home."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.app.exit import exits


@exits
def show_id(
    home: Annotated[Path, typer.Argument(help="Folder of a peer's keys and state.")],
) -> None:
    """Print the id of the peer in a home, and make its key if it has none."""
    from swarm.identity import load_or_create

    print(load_or_create(home / "identity.key").peer_id)
