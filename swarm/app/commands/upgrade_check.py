"""`swarm upgrade-check`: can this build take over a home, and take part in its run?"""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.terminal.exit import FAILED, exits
from swarm.terminal.options import AsJson


@exits
def upgrade_check(
    home: Annotated[str | None, typer.Option(help="Folder of keys and state.")] = None,
    bootstrap: Annotated[
        list[str] | None, typer.Option(help="Multiaddr of a peer that knows the network.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Run to look at, if there are several.")] = None,
    as_json: AsJson = False,
) -> int:
    """Check this build against a peer's home and run, before its older build is stopped.

    Exit status 1: a line begins with PROBLEM, and says what to do.
    """
    from swarm.app.upgrade_check import look
    from swarm.findings import lines
    from swarm.settings import load_settings
    from swarm.terminal.interrupt import run_until_interrupted
    from swarm.terminal.output import print_json
    from swarm.untrusted import printable

    flags = {"home": home, "bootstrap": bootstrap, "run": run}
    found = run_until_interrupted(look, load_settings(None, flags))
    if as_json:
        print_json(
            [
                {"topic": each.topic, "text": each.text, "problem": each.problem} | each.figures
                for each in found
            ]
        )
    else:
        for line in lines(found):
            print(printable(line))
    return FAILED if any(each.problem for each in found) else 0
