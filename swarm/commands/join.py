"""`swarm join`: from an invite link to a running peer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.terminal.exit import FAILED, exits


@exits
def join(
    link: Annotated[str, typer.Argument(help="Invite link, in quotes: 'swarm://…'.")],
    home: Annotated[
        Path | None, typer.Option(help="Folder of key, settings and state. [default: ~/.swarm]")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every event.")] = False,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Events as JSON lines.")] = False,
) -> int:
    """Join the run of an invite link.

    Shows the run and its owner, checks this machine, writes the settings to peer.toml in the home,
    and starts the peer. The same command, or swarm peer --config, goes on after a stop.
    """
    from swarm.commands.joining import look_at, prepare, settings_of
    from swarm.commands.start import start
    from swarm.settings import PeerSettings

    found = prepare(link, home or PeerSettings().home_path)
    if not look_at(found):
        return FAILED
    found.write()
    start(settings_of(found, {"verbose": verbose, "json_logs": json_logs}))
    return 0
