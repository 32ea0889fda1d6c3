"""The environment `genesys`: problem records as SYNTHETIC-1 and INTELLECT-2 used them.

A record has `problem_id`, `source`, `task_type`, `prompt`, `gold_standard_solution`,
`verification_info` and `metadata`, the last two as tables or JSON text. `task_type` chooses
graders."""

from collections.abc import Mapping
from typing import Any

import msgspec

from peers.environments.columns import Row, read_json
from peers.environments.dataset import ACCEPTED, DataOptions, OfRows, Pairs, answers_in, prompt_in
from peers.environments.graders import Grader, make_grader
from peers.environments.interface import Task
from peers.environments.pairs import json_pairs
from swarm.errors import UserError

COLUMNS = ("problem_id", "task_type", "prompt", "verification_info")

OPTIONAL = ("source", "in_source_id", "hf_dataset_name", "gold_standard_solution", "metadata")

ANSWERS = ("ground_truth", "answer", "output", "code_output")
"""Keys of `verification_info` that hold the expected answer; the first found is taken."""

VERIFIERS = {
    "verifiable_math": "math",
    "verifiable_code": "code",
    "prime_rl_code": "code",
    "code_output_prediction": "json",
    "verifiable_code_understanding": "json",
    "complex_json_output": "json",
}
"""Graders of the task types that INTELLECT-2 and SYNTHETIC-1 have."""


class GenesysOptions(DataOptions, frozen=True, kw_only=True):
    """Which records, and who verifies them."""

    verifiers: Pairs = msgspec.field(default_factory=list)
    """Graders of more task types, or others: a name each, or a table of `grader` and options."""


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
        where = f"{self.where}: verifiers"
        self._verifiers = verifiers_of(json_pairs(options.verifiers, where), where)
        self.call_seconds = max(each.call_seconds for each in self._verifiers.values())

    def task_of_row(self, index: int) -> Task:
        row = self.rows.row(index, (*COLUMNS, *self._present))
        where = self.rows.place(index)
        kind = row["task_type"]
        if not isinstance(kind, str) or kind not in self._verifiers:
            raise UserError(
                f"{where}: no verifier is given for the task_type {kind!r:.100}; add one to the "
                f'option, as in verifiers = {{{kind} = "exact"}}, or choose records with where'
            )
        info = table_in(row, "verification_info", where)
        data: dict[str, Any] = {
            "problem_id": str(row["problem_id"]),
            "task_type": kind,
            "source": str(row.get("source") or ""),
            "in_source_id": row.get("in_source_id"),
            "hf_dataset_name": row.get("hf_dataset_name"),
            "verification_info": info,
            "metadata": table_in(row, "metadata", where) if "metadata" in row else {},
        }
        grader, solution = self._verifiers[kind], row.get("gold_standard_solution")
        if key := next((key for key in ANSWERS if info.get(key) is not None), ""):
            data[ACCEPTED] = answers_in(info, key, where, grader)
            if grader.name != "code":  # whose ground truth is its tests
                solution = solution or grader.completion(data[ACCEPTED][0])
        return Task(prompt_in(row, "prompt", where), solution or "", data)

    def grading(self, task: Task) -> tuple[Grader, Mapping[str, Any]]:
        return self._verifiers[task.data["task_type"]], task.data["verification_info"]


def verifiers_of(given: Mapping[str, Any], where: str) -> dict[str, Grader]:
    """The grader of each task type; raises `UserError`."""
    found: dict[str, Grader] = {}
    for kind, value in {**VERIFIERS, **given}.items():
        options = dict(value) if isinstance(value, dict) else {"grader": value}
        name = options.pop("grader", None)
        if not isinstance(name, str):
            raise UserError(
                f"{where}: {kind} is {value!r:.60}; it must be a grader, or a table such as "
                '{grader = "number", tolerance = 0.01}'
            )
        found[kind] = make_grader(name, options)
    return found


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
