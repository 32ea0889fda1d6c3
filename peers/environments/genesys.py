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
from peers.environments.dataset import DataOptions, OfRows, prompt_in
from peers.environments.graders import Grader, make_grader, zero
from peers.environments.graders.code_tests import CONTAINERS
from peers.environments.interface import Grade, Task, Transcript
from peers.environments.pairs import json_pairs
from swarm.errors import UserError

COLUMNS = ("problem_id", "task_type", "prompt", "verification_info")
"""Columns that every record needs."""

OPTIONAL = ("source", "in_source_id", "gold_standard_solution", "metadata")

ANSWERS = ("ground_truth", "answer", "output")
"""Keys of `verification_info` that hold the expected answer; the first found is taken."""

VERIFIERS = ["verifiable_math=math", "verifiable_code=code", "prime_rl_code=code"]


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
        data = {
            "problem_id": str(row["problem_id"]),
            "task_type": kind,
            "source": str(row.get("source") or ""),
            "in_source_id": row.get("in_source_id"),
            "verification_info": table_in(row, "verification_info", where),
            "metadata": table_in(row, "metadata", where) if "metadata" in row else {},
        }
        solution = row.get("gold_standard_solution")
        return Task(prompt_in(row, "prompt", where), solution or "", data)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        if not transcript.finished:
            return zero("unfinished")
        info = task.data["verification_info"]
        answer = next((str(info[key]) for key in ANSWERS if key in info), task.answer)
        grader = self._verifiers[task.data["task_type"]]
        return grader.grade(transcript.text, answer, with_tests(info))


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


def with_tests(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record's `verification_info`, with `tests` where the grader `code` looks for them."""
    found = next((info[key] for key in CONTAINERS if key in info), info)
    return {**info, "tests": found}
