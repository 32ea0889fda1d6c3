"""The environment `dataset`: prompts and answers from a file of rows, graded by a grader's name."""

import json
import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from peers.environments import interface
from peers.environments.columns import Row, flat
from peers.environments.graders import Grader, make_grader, zero
from peers.environments.pairs import PAIR, json_pairs
from peers.environments.play import is_text
from peers.environments.rows import Rows
from peers.environments.tasks import Indexed
from swarm.errors import UserError
from swarm.wire.manifest import OptionValue

Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Pairs = Annotated[list[Annotated[str, Meta(pattern=PAIR, max_length=1000)]], Meta(max_length=32)]
"""A table, as `name=value` texts with values in JSON."""

FIELD = re.compile(r"\{([^{}]+)\}")

ACCEPTED = "accepted_answers"
"""Where a task's data have its answers, if they are not the task's own one."""
ANSWERS_MAX = 16
"""Answers of a task; each may take a grader's time."""


class DataOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rows are (docs/data.md)."""

    path: Annotated[str, Meta(min_length=1, max_length=1000)]
    split: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    subset: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    where: Pairs = []
    hash: Hash | None = None


class DatasetOptions(DataOptions, frozen=True, kw_only=True):
    """What the columns mean, and how completions are graded."""

    columns: Pairs = []
    """`prompt`: text, a list of messages, or text with columns in braces; default: the column
    `prompt`. `answer`: text or a number; default: the column `answer`; empty: there is none,
    because the grader needs other columns only. Any other name: what the grader gets under it."""
    grader: Annotated[str, Meta(max_length=100)] = "exact"
    grader_options: Pairs = []


class OfRows(interface.SingleTurn):
    """An environment whose tasks are rows of a data set."""

    options: DataOptions

    def __init__(self, options: DataOptions) -> None:
        """Open the data and check their hash; raises `UserError`."""
        super().__init__(options)
        self.where = f"environment {self.name!r}: options"
        self.rows = Rows.at(options.path, options.split, options.subset)
        if options.hash is not None:
            self.rows.check_hash(options.hash)
        self._conditions = flat(json_pairs(options.where, f"{self.where}: where"))

    @cached_property
    def indices(self) -> Sequence[int]:
        """The rows that are tasks; raises `UserError` if there is none."""
        if not self._conditions:
            return range(len(self.rows))
        return self.rows.matching(self._conditions, f"{self.where}: where")

    def tasks(self) -> interface.Tasks:
        """The rows; one of the wrong form is unusable, and costs nothing but itself."""
        indices = self.indices
        return Indexed(
            len(indices),
            lambda index: self.usable(indices[index]),
            lambda index: self.rows.place(indices[index]),
        )

    def usable(self, index: int) -> interface.Task:
        """The task of a row; raises `UnusableTask`."""
        # Were it an unusable row, this peer would draw another task than all others.
        self.rows.check_unchanged(index)
        place = self.rows.place(index)
        try:
            task = self.task_of_row(index)
            grader, data = self.grading(task)
            for answer in task.data.get(ACCEPTED, [task.answer]):
                grader.check(answer, data)
        except interface.NotGradable as error:
            raise interface.UnusableTask(f"{place}: {error}") from error
        except UserError as error:
            raise interface.UnusableTask(str(error)) from error
        if not is_text(task.answer):
            raise interface.UnusableTask(
                f"{place}: the answer {task.answer!r:.60} is no text in Unicode"
            )
        contents = [each.content for each in interface.messages_of(task.prompt)]
        if not all(map(is_text, contents)):
            raise interface.UnusableTask(
                f"{place}: the prompt {contents[-1]!r:.60} is no text in Unicode"
            )
        if not any(content.strip() for content in contents):
            raise interface.UnusableTask(f"{place}: the prompt is empty")
        return replace(task, place=place)

    def pins(self) -> Mapping[str, OptionValue]:
        """The data's hash; of the hub also their revision."""
        pinned = {"path": self.rows.where} if self.rows.where != self.options.path else {}
        return {"hash": self.rows.hash(), **pinned}

    def grade(self, task: interface.Task, transcript: interface.Transcript) -> interface.Grade:
        """The best grade over the task's answers; raises as the grader."""
        if not transcript.finished:
            return zero("unfinished")
        grader, data = self.grading(task)
        best, problems = zero("no answer"), []
        for answer in task.data.get(ACCEPTED, [task.answer]):
            try:
                grade = grader.grade(transcript.text, answer, data)
                best = grade if best.reward <= grade.reward else best
            except interface.NotGradable as error:
                problems.append(error)
        if problems and best.reward < 1:
            raise problems[0]
        return best

    @abstractmethod
    def task_of_row(self, index: int) -> interface.Task:
        """The task of a row; raises `UserError` for a row of the wrong form."""

    def grading(self, task: interface.Task) -> tuple[Grader, Mapping[str, Any]]:
        """What grades a task, and what the grader gets; unused where `grade` is another one."""
        raise NotImplementedError


class Dataset(OfRows):
    """Rewards what the grader accepts; a completion cut at the length limit earns nothing."""

    name = "dataset"
    version = "1"
    Options: ClassVar[type[msgspec.Struct] | None] = DatasetOptions
    options: DatasetOptions

    def __init__(self, options: DatasetOptions) -> None:
        """Open the data and make the grader; raises `UserError`."""
        super().__init__(options)
        where = f"{self.where}: columns"
        self._data = json_pairs(options.columns, where)
        for name, column in self._data.items():
            if not isinstance(column, str) or (not column and name != "answer"):
                raise UserError(f"{where}: {name} is {column!r:.60}; it must name a column")
        self._prompt = self._data.pop("prompt", "prompt")
        self._answer = self._data.pop("answer", "answer")
        answers = filter(None, [self._answer])
        self._names = [*prompt_columns(self._prompt), *answers, *self._data.values()]
        self.rows.check_columns(self._names, where)
        self._grader = make_grader(
            options.grader, json_pairs(options.grader_options, f"{self.where}: grader_options")
        )
        self.call_seconds = self._grader.call_seconds

    def task_of_row(self, index: int) -> interface.Task:
        row = self.rows.values(index, self._names)
        where = self.rows.place(index)
        answers = answers_in(row, self._answer, where, self._grader) if self._answer else [""]
        data = {name: row[column] for name, column in self._data.items()}
        if len(answers) > 1:
            data[ACCEPTED] = answers
        prompt = prompt_of(self._prompt, row, where)
        return interface.Task(prompt, self._grader.completion(answers[0]), data)

    def grading(self, task: interface.Task) -> tuple[Grader, Mapping[str, Any]]:
        return self._grader, task.data


def prompt_columns(prompt: str) -> list[str]:
    """The columns of a prompt: one, or those in the braces of a text."""
    return FIELD.findall(prompt) or [prompt]


def prompt_of(prompt: str, row: Row, where: str) -> interface.Prompt:
    """The prompt in a column, or a text with columns in braces; raises `UserError`."""
    if FIELD.search(prompt):
        return FIELD.sub(lambda found: text_in(row, found.group(1), where), prompt)
    return prompt_in(row, prompt, where)


def prompt_in(row: Row, column: str, where: str) -> interface.Prompt:
    """A prompt in a column: text or messages; raises `UserError`."""
    value = row[column]
    if isinstance(value, str):
        return value
    messages = [_message(each) for each in value] if isinstance(value, list) else []
    if not messages or None in messages:
        raise UserError(
            f"{where}: the prompt in {column!r} is {value!r:.60}; it must be text, or messages "
            "with role and content (text, or parts of the type text); repair the data or name "
            "another column"
        )
    return tuple(each for each in messages if each is not None)


def _message(given: Any) -> interface.Message | None:
    """A message of a data set, whose content is text or a list of parts; None if it is neither."""
    if not isinstance(given, dict):
        return None
    role, content = given.get("role"), given.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    is_text = all(isinstance(each, dict) and each.get("type") == "text" for each in parts)
    texts: list[Any] = [each.get("text") for each in parts] if is_text else []
    if not texts or not all(isinstance(each, str) for each in (role, *texts)):
        return None
    return interface.Message(str(role), "".join(texts))


def answers_in(row: Row, column: str, where: str, grader: Grader) -> list[str]:
    """The answers in a column, any of which is right; raises `UserError`."""
    value = row[column]
    if grader.takes_lists and isinstance(value, (list, dict)):
        return [json.dumps(value)]
    values = value if isinstance(value, list) and 1 <= len(value) <= ANSWERS_MAX else [value]
    return [text_in({column: each}, column, where) for each in values]


def text_in(row: Row, column: str, where: str) -> str:
    """Text or a number in a column, as text; raises `UserError`."""
    value = row[column]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and math.isfinite(value)):
        return str(value)
    raise UserError(
        f"{where}: {column!r} is {value!r:.60}; it must be text or a number; repair the data or "
        "name another column"
    )
