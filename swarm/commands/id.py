"""`swarm id`: the id of the peer in a home."""

from pathlib import Path

from swarm.terminal.exit import exits
from swarm.terminal.options import explained


@exits
@explained(__file__)
def show_id(home: Path, change: bool = False) -> None:
    """Print the id of the peer in a home, and make its key if it has none."""
    from swarm.wire.identity import home_identity

    print(home_identity(home, change=change).peer_id)
