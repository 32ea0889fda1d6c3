"""The environment `genesys`: problem records as SYNTHETIC-1 and INTELLECT-2 used them.

A record has `problem_id`, `source`, `task_type`, `prompt`, `gold_standard_solution`,
`verification_info` and `metadata`, the last two as tables or as JSON text. Graders are chosen by
the record's `task_type`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from peers.environments.columns import Row, read_json
from peers.environments.dataset import ACCEPTED, DataOptions, OfRows, answers_in, prompt_in
from peers.environments.graders import Grader, make_grader
from peers.environments.interface import Task
from peers.environments.pairs import json_pairs
from swarm.errors import UserError

COLUMNS = ("problem_id", "task_type", "prompt", "verification_info")
"""Columns that every record needs."""

OPTIONAL = ("source", "in_source_id", "gold_standard_solution", "metadata")

ANSWERS = ("ground_truth", "answer", "output", "code_output")
"""Keys of `verification_info` that hold the expected answer; the first found is taken."""

VERIFIERS = [
    *("verifiable_math=math", "verifiable_code=code", "prime_rl_code=code"),
    *("code_output_prediction=json", "verifiable_code_understanding=json"),
    "complex_json_output=json",
]


class GenesysOptions(DataOptions, frozen=True, kw_only=True):
    """Which records, and who verifies them."""

    verifiers: Annotated[
        list[Annotated[str, Meta(pattern=r"^[^=\s]+=\S+", max_length=1000)]],
        Meta(min_length=1, max_length=64),
    ] = msgspec.field(default_factory=VERIFIERS.copy)
    """Each `TASK_TYPE=GRADER`, and in the same text the grader's options in JSON."""


class Genesys(OfRows):
    """Rewards what the verifier of the record's task type accepts."""

    name = "genesys"
    version = "1"
    Options = GenesysOptions
    options: GenesysOptions

    def __init__(self, options: GenesysOptions) -> None:
        """Open the records and make the verifiers; raises `UserError`."""
        super().__init__(options)
        self.rows.check_columns(COLUMNS, f"{self.where}: a record of genesys")
        self._present = [name for name in OPTIONAL if name in self.rows.columns]
        self._verifiers = verifiers_of(options.verifiers, f"{self.where}: verifiers")
        self.call_seconds = max(each.call_seconds for each in self._verifiers.values())

    def task_of_row(self, index: int) -> Task:
        row = self.rows.row(index, (*COLUMNS, *self._present))
        where = self.rows.place(index)
        kind = row["task_type"]
        if not isinstance(kind, str) or kind not in self._verifiers:
            raise UserError(
                f"{where}: no verifier is given for the task_type {kind!r:.100}; add one to the "
                f'option verifiers, such as "{kind}=exact", or choose records with where'
            )
        info = table_in(row, "verification_info", where)
        data: dict[str, Any] = {
            "problem_id": str(row["problem_id"]),
            "task_type": kind,
            "source": str(row.get("source") or ""),
            "in_source_id": row.get("in_source_id"),
            "verification_info": info,
            "metadata": table_in(row, "metadata", where) if "metadata" in row else {},
        }
        if key := next((key for key in ANSWERS if info.get(key) is not None), ""):
            data[ACCEPTED] = answers_in(info, key, where, self._verifiers[kind])
        solution = row.get("gold_standard_solution")
        return Task(prompt_in(row, "prompt", where), solution or "", data)

    def grading(self, task: Task) -> tuple[Grader, Mapping[str, Any]]:
        return self._verifiers[task.data["task_type"]], task.data["verification_info"]


def verifiers_of(given: Sequence[str], where: str) -> dict[str, Grader]:
    """The grader of each task type; raises `UserError`."""
    found: dict[str, Grader] = {}
    for each in given:
        first, *pairs = _words(each, where)
        kind, _, name = first.partition("=")
        if any("=" not in pair for pair in pairs):
            raise UserError(f"{where} has {each!r}; after the grader come name=value pairs only")
        if kind in found:
            raise UserError(f"{where} gives {kind} two graders; remove one")
        found[kind] = make_grader(name, json_pairs(pairs, where))
    return found


def _words(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{where} has {text!r}, which cannot be read ({error})") from error


def table_in(row: Row, column: str, where: str) -> dict[str, Any]:
    """A table in a column, or as JSON text in it; nothing for null. Raises `UserError`."""
    value = row[column]
    try:
        value = read_json(value, column) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"{where}: {error}; repair the record") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where}: {column} is {value!r:.60}; it must be a table; repair it")
    return value
