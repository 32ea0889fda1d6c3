"""`swarm trace`: one submission's way through the swarm, hop by hop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.options import AsJson


@exits
def trace(
    submission: Annotated[str, typer.Argument(help="Hash of the submission, or its beginning.")],
    logs: Annotated[
        Path, typer.Option(help="A log that --json-logs wrote, or a folder of such logs.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show when a submission was generated, delivered, checked, fetched and trained on."""
    import dataclasses

    from swarm.look.trace import read_events, trace_lines, trace_of
    from swarm.terminal.output import print_json

    whole, spans = trace_of(read_events(logs), submission)
    if as_json:
        print_json({"submission": whole, "spans": [dataclasses.asdict(span) for span in spans]})
    else:
        print(numbered("\n".join(trace_lines(whole, spans))))
