"""The environment `code`: a completion is a Python program that must pass every hidden test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from peers.environments.code.problems import (
    LAMBDA_STEPS_MAX,
    PARAMETERS,
    QUESTIONS,
    STEPS,
    STEPS_MAX,
    Part,
    Style,
    make_problem,
    parts_named,
)
from peers.environments.graders.base import zero
from peers.environments.graders.code import Code as Grader
from peers.environments.graders.code import CodeLimits
from peers.environments.interface import Grade, SingleTurn, Task, Tasks, Transcript
from peers.environments.tasks import Generated
from peers.sandbox import Limits, Outcome, Program, run
from swarm.errors import UserError

TESTS_MAX = 64
NAMES_MAX = 64


class CodeOptions(CodeLimits, frozen=True, kw_only=True):
    """How hard the problems are, and how they are tested."""

    steps: Annotated[int, Meta(ge=1, le=STEPS_MAX)] = 2
    """Operations on the list, one after another."""
    style: Literal["function", "stdin", "both", "lambda"] = "both"
    """Whether a solution is a function, or a program that reads standard input. lambda: a function
    of one expression, for a model that knows no English."""
    tests: Annotated[int, Meta(ge=2, le=TESTS_MAX)] = 8
    operations: Annotated[list[str], Meta(max_length=NAMES_MAX)] = msgspec.field(
        default_factory=list
    )
    """Names of the operations that are drawn; all if empty."""
    questions: Annotated[list[str], Meta(max_length=NAMES_MAX)] = msgspec.field(
        default_factory=list
    )
    """The same of the questions at the end."""
    parameters: Annotated[int, Meta(ge=2, le=PARAMETERS)] = PARAMETERS
    """How many values the number of an operation or question may have."""


class Code(SingleTurn):
    """Generated problems, graded by the grader `code`."""

    name = "code"
    version = "1"
    safe_for_strangers = True
    Options = CodeOptions
    options: CodeOptions

    def __init__(
        self,
        options: CodeOptions = CodeOptions(),  # noqa: B008
        run_program: Callable[[Program, Limits], Outcome] = run,
    ) -> None:
        super().__init__(options)
        if options.style == "lambda" and options.steps > LAMBDA_STEPS_MAX:
            raise UserError(
                f"environment 'code': options: steps is {options.steps}; with the style lambda it "
                f"may be at most {LAMBDA_STEPS_MAX}"
            )
        self._operations = _drawn("operations", STEPS, options.operations)
        self._questions = _drawn("questions", QUESTIONS, options.questions)
        self._grader = Grader(options, run_program)
        self._styles: tuple[Style, ...] = (
            ("function", "stdin") if options.style == "both" else (options.style,)
        )
        self.call_seconds = self._grader.call_seconds

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """1.0 for a finished program that passes all tests, else 0.0; raises as the grader."""
        if not transcript.finished:
            return zero("unfinished")
        return self._grader.grade(transcript.text, task.answer, task.data)

    def _make(self, randomness: bytes) -> Task:
        options = self.options
        problem = make_problem(
            randomness,
            options.steps,
            self._styles,
            options.tests,
            self._operations,
            self._questions,
            options.parameters,
        )
        is_function = problem.style != "stdin"
        tests = {
            "inputs": [[list(c.numbers)] if is_function else c.line for c in problem.cases],
            "outputs": [case.expected for case in problem.cases],
            "fn_name": "solve" if is_function else "",
        }
        return Task(problem.statement, problem.solution, {"tests": tests})


def _drawn(option: str, parts: Sequence[Part], names: list[str]) -> Sequence[Part]:
    try:
        return parts_named(parts, names)
    except ValueError as error:
        raise UserError(f"environment 'code': options: {option}: {error}") from error
