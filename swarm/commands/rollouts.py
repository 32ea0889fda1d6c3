"""`swarm rollouts`: read the rollouts of a run.

Imports pyarrow lazily, to start without it."""

from __future__ import annotations

import shutil
import sys
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.errors import UserError
from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.options import AsJson, VerdictSource, WhichRun, explained
from swarm.terminal.output import print_json
from swarm.terminal.untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swarm.look.rollouts.seen import SeenRollout
    from swarm.look.rollouts.sources import Source

app = typer.Typer(help="Read the rollouts of a run.", no_args_is_help=True)

SHOWN = 16
"""Rollouts that `show` prints unless a limit is given: two groups of eight."""


def chosen(
    path: Path,
    environment: str | None = None,
    reward: str | None = None,
    peer: str | None = None,
    step: str | None = None,
    tokenizer: Path | None = None,
    ledger: Path | None = None,
    run: str | None = None,
) -> tuple[Source, Iterator[SeenRollout]]:
    """Find the rollouts that pass the filters, at least one; raises `UserError`."""
    from swarm.look.rollouts.filters import Filters, parse_range
    from swarm.look.rollouts.sources import open_source

    filters = Filters(
        environment,
        parse_range("--reward", reward, "0:0.5"),
        peer,
        parse_range("--step", step, "10:20"),
    )
    source = open_source(path, ledger, tokenizer, run)
    found = source.rollouts(filters)
    first = next(found, None)
    if first is None:
        raise UserError(_nothing(source))
    return source, chain([first], found)


def _nothing(source: Source) -> str:
    """Say why no rollout passes the filters."""
    if source.problems:
        return source.problems[0]
    steps = sorted({found.step for found in source.files})
    return (
        f"none of the {len(source.files):,} submissions in {source.path}, of steps {steps[0]} to "
        f"{steps[-1]}, has a rollout that passes the filters"
        + ("" if any(source.verdicts()) else "; they have no verdicts here, so no rewards")
    )


@app.command("show")
@exits
@explained(__file__)
def show(
    path: Path,
    environment: str | None = None,
    reward: str | None = None,
    peer: str | None = None,
    step: str | None = None,
    limit: int = SHOWN,
    tokenizer: Path | None = None,
    ledger: VerdictSource = None,
    run: WhichRun = None,
    as_json: AsJson = False,
) -> None:
    """Print rollouts: each prompt, then what followed it, with rewards and verdict."""
    require_extra("infer", "swarm rollouts show")
    from swarm.look.rollouts.seen import as_row

    source, found = chosen(path, environment, reward, peer, step, tokenizer, ledger, run)
    shown = islice(found, limit or None)
    if as_json:
        print_json({"source": str(source.path), "rollouts": [as_row(seen) for seen in shown]})
    else:
        from rich.console import Console
        from rich.text import Text

        from swarm.look.rollouts.screen import LEGEND, lines

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        console = Console(soft_wrap=True, highlight=False, markup=False)
        console.print(Text(f"{LEGEND}\n", "bright_black"))
        for line in lines(shown, width):
            console.print(line)
        if next(found, None) is not None:
            print("\nmore follow: --limit 0 shows all")
    _warn(source)


@app.command("export")
@exits
@explained(__file__)
def export(
    path: Path,
    out: Path,
    environment: str | None = None,
    reward: str | None = None,
    peer: str | None = None,
    step: str | None = None,
    limit: int = 0,
    tokenizer: Path | None = None,
    ledger: VerdictSource = None,
    run: WhichRun = None,
) -> None:
    """Write rollouts as data: texts, token ids, loss masks, rewards, advantages and verdicts."""
    require_extra("infer", "swarm rollouts export")
    from swarm.look.rollouts import export as data

    data.check_target(out)
    source, found = chosen(path, environment, reward, peer, step, tokenizer, ledger, run)
    print(numbered(f"{data.export(islice(found, limit or None), out):,} rollouts are in {out}"))
    _warn(source)


def _warn(source: Source) -> None:
    """Say on standard error what could not be read, and that the texts are missing."""
    if source.tokenizer is None:
        print(
            "token ids are shown, because no checkpoint of the run lies here; for text give "
            "--tokenizer FOLDER",
            file=sys.stderr,
        )
    for problem in source.problems[:5]:
        print(f"not read: {printable(problem)}", file=sys.stderr)
    if len(source.problems) > 5:
        print(f"not read: {len(source.problems) - 5:,} more", file=sys.stderr)
