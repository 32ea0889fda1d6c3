"""A terminal pager for lines that are made as they are read."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from swarm.errors import UserError
from swarm.look.rollouts.screen import GROUP_MARK

LESS_OPTIONS = (
    *("-R", "-i", "-F", f"+/^{GROUP_MARK}"),
    "-Psn next group, N previous, / search, q leave   (heavy bar = in the loss)",
)
"""Colours; searches ignore case; leave at once if all fits; n and N jump between groups. The last
one is the line at the bottom, which less shows in ASCII only."""


def print_lines(lines: Iterable[Text]) -> None:
    """Print lines, coloured on a terminal only."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in lines:
        console.print(line)


def page_lines(lines: Iterable[Text]) -> None:
    """Show lines in the user's pager, or print them where there is no terminal."""
    command = _pager()
    if not sys.stdout.isatty() or command is None:
        print_lines(lines)
        return
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"PAGER is {command[0]!r}, which cannot be started ({error.strerror}); unset PAGER, "
            "or use `swarm rollouts show`"
        ) from error
    assert process.stdin is not None
    console = Console(
        file=process.stdin, force_terminal=True, soft_wrap=True, highlight=False, markup=False
    )
    try:
        with process.stdin:
            for line in lines:
                console.print(line)
    except BrokenPipeError:  # the reader has left
        pass
    process.wait()


def _pager() -> list[str] | None:
    chosen = shlex.split(os.environ.get("PAGER", ""))
    if chosen and Path(chosen[0]).name != "less":
        return chosen
    less = shutil.which("less")
    return [less, *LESS_OPTIONS] if less else None
