"""`swarm rollouts`: read submission files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.app.exit import exits
from swarm.app.extras import require_extra
from swarm.app.options import AsJson
from swarm.app.output import plain, print_json
from swarm.untrusted import printable

if TYPE_CHECKING:  # the command line starts without pyarrow
    from swarm.rollouts.show import ShownSegment

TEXT_CHARACTERS_MAX = 100_000
"""Longest segment that is printed; longer ones are cut."""

app = typer.Typer(help="Read submission files.", no_args_is_help=True)


@app.command("show")
@exits
def show(
    file: Annotated[Path, typer.Argument(help="Submission: a Parquet file of rollouts.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with tokenizer.json; without it, token ids are shown."),
    ] = None,
    groups: Annotated[int, typer.Option(help="Number of groups to show; 0 shows all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print a submission: its header, then each prompt with what followed it."""
    require_extra("infer", "swarm rollouts show")
    from swarm.rollouts.show import show as read_submission

    header, rows = read_submission(file, tokenizer)
    shown = [row for row in rows if not groups or row.group < groups]
    if as_json:
        print_json({"header": plain(header), "rows": [dataclasses.asdict(row) for row in shown]})
        return
    for name, value in plain(header).items():
        print(f"{name:<20} {printable(str(value))}")
    group = -1
    for row in shown:
        if row.group != group:
            group = row.group
            print(f"\ngroup {group}  {_text(row.segments[0])}")
        for number, segment in enumerate(row.segments[1:]):
            print(f"  {'' if number else row.sample:>3}  {_described(segment)}")


def _described(segment: ShownSegment) -> str:
    if segment.log_probabilities is None:
        return f"{segment.kind}: {_text(segment)}"
    return (
        f"{len(segment.tokens):>5} tokens  log p {sum(segment.log_probabilities):8.3f}  "
        f"{segment.finish}  {_text(segment)}"
    )


def _text(segment: ShownSegment) -> str:
    return printable(segment.text or str(segment.tokens), TEXT_CHARACTERS_MAX)
