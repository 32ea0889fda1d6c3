"""`swarm dataset select`: rows of a data set by their prompts, without a policy."""

from __future__ import annotations

import sys
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peers.dataset.similar import Texts, shingles
from swarm.errors import UserError
from swarm.look.rollouts.filters import Range, parse_range
from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.options import EnvironmentOptions, environment_options
from swarm.terminal.output import check_writable
from swarm.terminal.strict_json import to_json

if TYPE_CHECKING:
    from peers.environments.dataset import OfRows

SCRIPT_SHARE = 0.9
"""Least share of a prompt's letters in the wanted writing systems: formulas have Greek ones."""

NAMED_MAX = 20
"""Rows too much like an evaluation that are named one by one."""


@dataclass
class Rules:
    """Which prompts are kept; each is compared with those before it."""

    characters: Range
    scripts: tuple[str, ...]
    similarity: float
    evaluations: Texts = field(default_factory=Texts)
    contaminated: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _kept: Texts = field(default_factory=Texts)

    def why_not(self, prompt: str, place: str) -> str:
        """Why a row is left out; empty: it is kept, and remembered."""
        if not self.characters[0] <= len(prompt) <= self.characters[1]:
            return "outside --characters"
        if self.scripts and share_in(prompt, self.scripts) < SCRIPT_SHARE:
            return "outside --script"
        if (text := " ".join(prompt.split())) in self._seen:
            return "duplicates"
        self._seen.add(text)
        runs = shingles(prompt)
        alike, other = self.evaluations.nearest(runs)
        if alike >= self.similarity:
            self.contaminated.append(f"{place} is like {other} ({alike:.2f})")
            return "like --apart-from"
        if self._kept.nearest(runs)[0] >= self.similarity:
            return "near duplicates"
        self._kept.add(runs, place)
        return ""


def share_in(text: str, scripts: tuple[str, ...]) -> float:
    """The share of a text's letters in these writing systems, as Unicode names them."""
    letters = [unicodedata.name(each, "") for each in text if each.isalpha()]
    return sum(each.startswith(scripts) for each in letters) / max(1, len(letters))


@exits
def select_command(
    environment: Annotated[
        str, typer.Option(help="Environment of the rows: dataset, or one like it.")
    ] = "dataset",
    option: EnvironmentOptions = None,
    characters: Annotated[str, typer.Option(help="Length of the prompt, as LOW:HIGH.")] = "1:",
    script: Annotated[
        list[str] | None,
        typer.Option(help="Writing system of nine letters in ten: latin, cjk, cyrillic; several."),
    ] = None,
    similarity: Annotated[
        float, typer.Option(min=0.1, max=1, help="Runs of five words that near duplicates share.")
    ] = 0.8,
    apart_from: Annotated[
        list[str] | None,
        typer.Option(
            help="Evaluation that no prompt may be like: a data set, or as a table of TOML the "
            "options of the environment dataset for it; several."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Data set of the kept rows: JSON lines.")] = Path(
        "selected.jsonl"
    ),
) -> None:
    """Keep rows by their prompts: length, writing system, no duplicates, apart from evaluations.

    Conditions on columns are the option `where` of the environment.
    """
    require_extra("infer", "swarm dataset select")
    check_writable("--out", out, (".jsonl",))
    bounds = parse_range("--characters", characters, "20:4000") or (0.0, 0.0)
    rules = Rules(bounds, tuple(map(str.upper, script or ())), similarity)
    rows = _rows_of(environment, environment_options(option))
    for each in apart_from or ():
        for _, prompt, place in _prompts(_rows_of("dataset", _evaluation(each, rows))):
            rules.evaluations.add(shingles(prompt), place)
    counts: Counter[str] = Counter()
    part = out.with_name(f"{out.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for index, prompt, place in _prompts(rows):
            reason = rules.why_not(prompt, place)
            counts[reason] += 1
            if not reason:
                print(to_json(rows.rows[index]), file=file)
    part.replace(out)
    for each in rules.contaminated[:NAMED_MAX]:
        print(numbered(f"warning: {each}"), file=sys.stderr)
    kept, total = counts.pop("", 0), len(rows.indices)
    counts["of which no task can be made"] = total - kept - counts.total()
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
    ending = f"; left out: {reasons}" if reasons else ""
    print(numbered(f"{kept:,} of {total:,} rows are kept; they are in {out}") + ending)


def _rows_of(name: str, options: dict[str, Any]) -> OfRows:
    from peers.environments.dataset import OfRows
    from peers.environments.registry import load_any

    environment = load_any(name.partition("@")[0], options)
    if not isinstance(environment, OfRows):
        raise UserError(
            f"environment {name!r} with these options has no rows to choose from; swarm dataset "
            "filter tries the tasks of any environment with a policy"
        )
    return environment


def _evaluation(given: str, rows: OfRows) -> dict[str, Any]:
    """Options of the environment dataset for an evaluation, with the rows' prompt by default."""
    try:
        table: Any = tomllib.loads(f"x = {given}")["x"] if given[:1] == "{" else {"path": given}
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"--apart-from is {given!r}, which is no TOML ({error}); write it as "
            "{path = 'DATA', split = 'test', columns = {prompt = 'question'}}"
        ) from error
    columns = {"prompt": rows.prompt_column, "answer": "", **table.get("columns", {})}
    return {**table, "columns": columns}


def _prompts(rows: OfRows) -> Iterator[tuple[int, str, str]]:
    """Row, prompt and place of each row that a task can be made of."""
    from peers.environments.interface import UnusableTask, messages_of
    from peers.environments.play import indexed_tasks

    tasks = indexed_tasks(rows)
    assert tasks is not None
    for number, index in enumerate(rows.indices):
        with suppress(UnusableTask):
            contents = [each.content for each in messages_of(tasks.at(number).prompt)]
            yield index, "\n".join(contents), tasks.named(number)
