"""`swarm id`: the id of the peer in a home."""

from pathlib import Path

from swarm.terminal.exit import exits
from swarm.terminal.options import Home, explained


@exits
@explained(__file__)
def show_id(home: Home = Path("~/.swarm"), change: bool = False) -> None:
    """Print the id of the peer in a home, and make its key if it has none."""
    from swarm.wire.identity import home_identity

    print(home_identity(home.expanduser(), change=change).peer_id)
