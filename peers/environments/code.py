"""The environment `code`: a completion is a Python program that must pass every hidden test."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from peers.environments.graders import zero
from peers.environments.graders.code import Code as Grader
from peers.environments.graders.code import CodeLimits
from peers.environments.interface import Grade, SingleTurn, Task, Tasks, Transcript
from peers.environments.tasks import Generated
from peers.sandbox import Limits, Outcome, Program, run
from swarm.errors import UserError
from swarm.rollouts.seeds import Draws, digest

# Generated programming problems: steps on a list of integers, then one question about the result.
#
# The number of steps grades the difficulty. Statement and reference solution are written from the
# same steps, and the reference computes the expected results.

STEPS_MAX = 8
LAMBDA_STEPS_MAX = 2
"""An expression of more steps repeats its parts too often."""
NUMBERS_MAX = 12
"""Most numbers in a test's list."""
VALUE_MAX = 50

Numbers = list[int]


@dataclass(frozen=True)
class Part:
    """A word, a sentence, and the Python expression that does the same to `xs`."""

    brief: str
    sentence: str
    code: str
    least: int = 2
    """Smallest value of the parameter `k`."""

    @property
    def name(self) -> str:
        return self.brief.split()[0]


STEPS = (
    Part("div {k}", "keep only the numbers that are divisible by {k}",
          "[x for x in xs if x % {k} == 0]"),
    Part("nodiv {k}", "drop the numbers that are divisible by {k}",
          "[x for x in xs if x % {k} != 0]"),
    Part("over {k}", "keep only the numbers greater than {k}", "[x for x in xs if x > {k}]", -9),
    Part("times {k}", "multiply every number by {k}", "[x * {k} for x in xs]"),
    Part("add {k}", "add {k} to every number", "[x + {k} for x in xs]", 1),
    Part("from {k}", "replace every number by its absolute difference to {k}",
          "[abs(x - {k}) for x in xs]"),
    Part("mod {k}", "replace every number by its remainder modulo {k} (never negative)",
          "[x % {k} for x in xs]"),
    Part("sort", "sort the numbers in ascending order", "sorted(xs)"),
    Part("reverse", "reverse the order of the numbers", "xs[::-1]"),
    Part("unique", "keep the first of equal numbers only", "list(dict.fromkeys(xs))"),
    Part("sums", "replace every number by the sum of itself and all before it",
          "[sum(xs[:i + 1]) for i in range(len(xs))]"),
    Part("steps",
          "replace the list by the differences of neighbours, each number minus the one before",
          "[b - a for a, b in zip(xs, xs[1:])]"),
    Part("first {k}", "keep only the first {k} numbers", "xs[:{k}]"),
    Part("rotate {k}", "rotate the list to the left by {k} positions",
          "xs[{k} % len(xs):] + xs[:{k} % len(xs)] if xs else xs"),
)  # fmt: skip

QUESTIONS = (
    Part("sum", "the sum of the numbers, 0 for an empty list", "sum(xs)"),
    Part("max {k}", "the largest number, or {k} for an empty list", "max(xs, default={k})", -9),
    Part("min {k}", "the smallest number, or {k} for an empty list", "min(xs, default={k})", -9),
    Part("count", "how many numbers are left", "len(xs)"),
    Part("count {k}", "how many numbers are at least {k}", "sum(x >= {k} for x in xs)", -9),
    Part("list", "the list of numbers", "xs"),
)
ATTEMPTS_MAX = 1000
"""Problems drawn for one task; fewer than half have a constant answer."""
PARAMETERS = 11
"""Most values of a parameter, from the part's smallest on."""


# For a small model: its characters lack %, which other operations need.
BRIEF_STEPS = [part for part in STEPS if part.name in ("over", "times", "add", "first")]
BRIEF_QUESTIONS = [part for part in QUESTIONS if part.name in ("sum", "max", "min", "list")]
BRIEF_PARAMETERS = 8


def make_problem(randomness: bytes, options: CodeOptions) -> Task:
    """Draw a problem of `options.steps` operations with `options.tests` hidden tests.

    The first list is empty. Equal problems have equal tests, so that a program that was judged
    once need not run again. A problem whose tests all expect the same is drawn again, because a
    constant would solve it. Raises `ValueError` after `ATTEMPTS_MAX` such problems.
    """
    draws, brief = Draws("swarm/1/code", randomness), options.style == "lambda"
    steps, questions = (BRIEF_STEPS, BRIEF_QUESTIONS) if brief else (STEPS, QUESTIONS)
    parameters = BRIEF_PARAMETERS if brief else PARAMETERS
    for _ in range(ATTEMPTS_MAX):
        chosen = [_filled(steps, parameters, draws) for _ in range(options.steps)]
        task = _problem(brief, chosen, _filled(questions, parameters, draws), options.tests)
        outputs = task.data["tests"]["outputs"]
        if any(output != outputs[0] for output in outputs):
            return task
    raise ValueError(f"{ATTEMPTS_MAX} problems of {options.steps} steps have a constant answer")


def _problem(brief: bool, chosen: list[Part], question: Part, tests: int) -> Task:
    lines = [f"xs = {part.code}" for part in chosen]
    body = "\n    ".join([*lines, f"return {question.code}"])
    function = f"def solve(xs):\n    {body}\n"
    solve = _compiled(function)
    draws = Draws("swarm/1/code-tests", digest("swarm/1/code-problem", function.encode()))
    example, *others = (_numbers(draws) for _ in range(tests))
    inputs: list[Numbers] = [[], *others]
    outputs = [solve(list(xs)) for xs in inputs]
    data = {"tests": {"inputs": [[xs] for xs in inputs], "outputs": outputs, "fn_name": "solve"}}
    if brief:
        asked = "; ".join(part.brief for part in (*chosen, question))
        return Task(f"{asked}>", _lambda([*chosen, question]), data)
    steps = "".join(f"{n}. {part.sentence}.\n" for n, part in enumerate(chosen, 1))
    statement = (
        "Write a Python function solve(xs) for a list xs of integers. It must, in this order:\n"
        f"{steps}Then return {question.sentence}.\nExample: solve({example}) returns "
        f"{solve(list(example))}.\n"
    )
    return Task(statement, function, data)


def _lambda(parts: Sequence[Part]) -> str:
    """One expression that does all parts, without the spaces that Python does not need."""
    expression = "xs"
    for part in parts:
        given = expression if " else " not in expression else f"({expression})"
        expression = part.code.replace("xs", given)
    return re.sub(r" ?([^\w\s]+) ?", r"\1", f"solve=lambda xs:{expression}")


def _filled(parts: Sequence[Part], parameters: int, draws: Draws) -> Part:
    part = parts[draws.below(len(parts))]
    k = part.least + draws.below(parameters)
    return Part(part.brief.format(k=k), part.sentence.format(k=k), part.code.format(k=k))


def _numbers(draws: Draws) -> Numbers:
    length = 1 + draws.below(NUMBERS_MAX)
    return [draws.below(2 * VALUE_MAX + 1) - VALUE_MAX for _ in range(length)]


def _compiled(source: str) -> Callable[[Numbers], int | Numbers]:
    """The reference solution, which is this file's own text and needs no sandbox."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    solve: Callable[[Numbers], int | Numbers] = namespace["solve"]
    return solve


TESTS_MAX = 64


class CodeOptions(CodeLimits, frozen=True, kw_only=True):
    """How hard the problems are, and how they are tested."""

    steps: Annotated[int, Meta(ge=1, le=STEPS_MAX)] = 2
    """Operations on the list, one after another."""
    style: Literal["function", "lambda"] = "function"
    """lambda: a function of one expression, asked for in a few words, for a model that knows no
    English."""
    tests: Annotated[int, Meta(ge=2, le=TESTS_MAX)] = 8


class Code(SingleTurn):
    """Generated problems, graded by the grader `code`."""

    name = "code"
    version = "2"
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
        self._grader = Grader(options, run_program)
        self.call_seconds = self._grader.call_seconds

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """1.0 for a finished program that passes all tests, else 0.0; raises as the grader."""
        if not transcript.finished:
            return zero("unfinished")
        return self._grader.grade(transcript.text, task.answer, task.data)

    def _make(self, randomness: bytes) -> Task:
        return make_problem(randomness, self.options)
