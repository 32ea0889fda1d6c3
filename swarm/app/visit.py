"""Short visits to a network: a node finds a run without joining it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from swarm.app.local_node import open_node
from swarm.errors import UserError
from swarm.node.joining import LAST_BOOTSTRAP, find_run, join_network
from swarm.node.node import Node
from swarm.run.run import Run
from swarm.settings import PeerSettings


@asynccontextmanager
async def visit(
    bootstrap: Sequence[str] | None,
    run: str | None,
    *,
    home: Path | None = None,
    looks_on: bool = False,
) -> AsyncIterator[tuple[Node, Run]]:
    """Open a node that has found a run, without joining it.

    The node's key and state are in `home`, by default a temporary folder. `looks_on`: see
    `find_run`.
    """
    with tempfile.TemporaryDirectory(prefix="swarm-observer-") as momentary:
        settings = PeerSettings(
            role=["observer"],
            bootstrap=list(bootstrap or last_bootstrap()),
            listen=["/ip4/127.0.0.1/tcp/0"],
            home=str(home or momentary),
            run=run,
        )
        async with open_node(settings, events_sink=lambda event: None) as node:
            yield node, await find_run(node, await join_network(node), looks_on=looks_on)


def last_bootstrap(home: Path | None = None) -> list[str]:
    """Read the bootstrap addresses that the peer with this home last joined through.

    Raises `UserError` if there are none.
    """
    path = (home.expanduser() if home else PeerSettings().home_path) / LAST_BOOTSTRAP
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        raise UserError(
            "which network? give --bootstrap MULTIADDR (no peer has joined one from "
            f"{path.parent} yet)"
        ) from None
