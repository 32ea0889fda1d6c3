"""`swarm preflight`: what an inference peer would find on this machine, and what it would do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.terminal.exit import exits
from swarm.terminal.options import AsJson

Model = Annotated[
    Path | None,
    typer.Option(help="Folder of a policy to load as well, such as a snapshot of the base policy."),
]


@exits
def preflight(
    bootstrap: Annotated[
        list[str] | None, typer.Option(help="Multiaddr of a peer that knows the network.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Run to look at, if there are several.")] = None,
    home: Annotated[str | None, typer.Option(help="Folder of keys and state.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine that generates: native or vllm.")
    ] = None,
    uplink_mbps: Annotated[
        float | None, typer.Option(help="Upload limit for pieces, in megabits per second.")
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine for the role inference, without joining a run.

    Exit status 1: the peer could not work like this.
    """
    from swarm.app.preflight import look
    from swarm.findings import figures, lines
    from swarm.settings import load_settings
    from swarm.terminal.interrupt import run_until_interrupted
    from swarm.terminal.output import print_json
    from swarm.untrusted import printable

    flags = {
        "bootstrap": bootstrap,
        "run": run,
        "home": home,
        "engine": engine,
        "uplink_mbps": uplink_mbps,
    }
    folder = model.expanduser().absolute() if model is not None else None
    found = run_until_interrupted(look, load_settings(config, flags), folder)
    if as_json:
        print_json(figures(found))
    else:
        for line in lines(found):
            print(printable(line))
    return int(any(each.problem for each in found))
