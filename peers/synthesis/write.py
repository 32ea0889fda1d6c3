"""The data set of `swarm synthesize`: Parquet in a Hugging Face folder, with credits."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from peers.synthesis.selection import Selection, Solution
from swarm.errors import UserError
from swarm.look.rollouts.export import COLUMNS, Table, write_card, write_parquet
from swarm.terminal.strict_json import to_json
from swarm.terminal.untrusted import printable

CREDITS_FILE = "credits.json"

_MESSAGES = pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))

LOCAL: dict[str, tuple[pa.DataType, str]] = {
    "prompt": (pa.string(), "prompt of text; null for a chat"),
    "answer": (pa.string(), "the teacher's answer to a prompt of text; null for a chat"),
    "messages": (
        _MESSAGES,
        "the whole chat, with the teacher's turns as assistant; null after a prompt of text",
    ),
    "environment": (pa.string(), "environment of the task"),
    "environment_version": (pa.string(), "its version"),
    "task": (pa.int64(), "index of the task"),
    "sample": (pa.int64(), "index among the solutions of the task"),
    "reward": (pa.float64(), "reward of the solution"),
    "tokens": (pa.int64(), "tokens that the teacher wrote"),
    "teacher": (pa.string(), "BLAKE3-256 of the teacher's weights, config and tokenizer"),
}
"""Columns of solutions made on one machine."""

OF_RUN = COLUMNS | {
    "messages": (
        _MESSAGES,
        "the whole chat, with the worker's turns as assistant; null after a prompt of text, and "
        "where the chat template does not give the tokens of `turns` again",
    )
}
"""Columns of a run's solutions: those of its rollouts, and the chat."""

THIS_MACHINE = "this machine"


def check_target(out: Path) -> None:
    """Raise `UserError` if `--out` would overwrite something or cannot be made."""
    if out.suffix:
        raise UserError(f"--out {out} must name a folder without a suffix")
    if out.exists():
        raise UserError(f"--out {out} exists already; choose another folder")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out} cannot be written: there is no folder {out.parent}")


def write(solutions: Iterable[Solution], selection: Selection, out: Path, source: str) -> None:
    """Select solutions and write those to keep; raises `UserError`, also if there are none.

    The folder appears complete or not at all. `source` says in a few words who made them.
    """
    columns = OF_RUN if source == "run" else LOCAL
    table = Table(columns, ("synthetic", "reasoning"), "")
    aside = out.with_name(out.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        rows = (each.row for each in selection.of(solutions))
        write_parquet(rows, aside, table.schema)
        write_card(aside, "Synthetic data", Table(table.columns, table.tags, _text(selection)))
        credits = {name or THIS_MACHINE: vars(each) for name, each in selection.credits.items()}
        (aside / CREDITS_FILE).write_text(to_json(credits, indent=2) + "\n", encoding="utf-8")
        aside.rename(out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def summary(selection: Selection) -> str:
    """What was kept, in a sentence."""
    left_out = selection.reasons()
    return (
        f"{selection.kept:,} of {selection.solutions:,} solutions are kept, of "
        f"{selection.tasks:,} tasks" + (f"; left out: {left_out}" if left_out else "")
    )


def credit_lines(selection: Selection) -> list[str]:
    """One line per contributor, with the most tokens first."""
    order = sorted(selection.credits.items(), key=lambda each: (-each[1].kept_tokens, each[0]))
    return [
        f"{printable(name) or THIS_MACHINE}: {credit.kept:,} of {credit.solutions:,} solutions, "
        f"{credit.kept_tokens:,} tokens"
        for name, credit in order
    ]


def _text(selection: Selection) -> str:
    credits = "\n".join(f"- {line}" for line in credit_lines(selection))
    return (
        f"{summary(selection)}. Rules: `{selection.rules.described()}`. Texts come from models, "
        f"perhaps on untrusted machines.\n\nKept, by contributor:\n\n{credits}"
    )
