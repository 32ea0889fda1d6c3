"""The environment `code`: small programs, asked for in a few words, that must pass hidden tests.

For demos and tests: `times 3; max -4>` asks for
`solve=lambda xs:max([x*3 for x in xs],default=-4)`. Real problems are a data set's, with the grader
`code`."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from peers.environments.graders import zero
from peers.environments.graders.code import Code as Grader
from peers.environments.graders.code import CodeLimits
from peers.environments.interface import Grade, SingleTurn, Task, Tasks, Transcript
from peers.environments.tasks import Generated
from peers.sandbox import Limits, Outcome, Program, run
from swarm.rollouts.seeds import Draws, digest


class Part(msgspec.Struct, frozen=True):
    """A few words, and the Python expression that does the same to `xs`."""

    words: str
    code: str
    least: int = 2
    """Smallest value of the parameter `k`."""


# A small model's characters lack %, which other operations would need.
STEPS = (
    Part("over {k}", "[x for x in xs if x>{k}]", -9),
    Part("times {k}", "[x*{k} for x in xs]"),
    Part("add {k}", "[x+{k} for x in xs]", 1),
    Part("first {k}", "xs[:{k}]"),
)
QUESTIONS = (
    Part("sum", "sum(xs)"),
    Part("max {k}", "max(xs,default={k})", -9),
    Part("min {k}", "min(xs,default={k})", -9),
    Part("list", "xs"),
)
PARAMETERS = 8
"""Values of a parameter, from the part's smallest on."""

ATTEMPTS_MAX = 1000
"""Problems drawn for one task; fewer than half have a constant answer."""

NUMBERS_MAX = 12
VALUE_MAX = 50
TESTS_MAX = 64


class CodeOptions(CodeLimits, frozen=True, kw_only=True):
    """How hard the problems are, and how they are tested."""

    steps: Annotated[int, Meta(ge=1, le=2)] = 1
    """Operations on the list, one after another; an expression of more would repeat its parts."""
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
        """Draw a problem whose tests differ in what they expect, lest a constant solve it."""
        draws = Draws("swarm/2/code", randomness)
        for _ in range(ATTEMPTS_MAX):
            parts = [_filled(STEPS, draws) for _ in range(self.options.steps)]
            task = _problem([*parts, _filled(QUESTIONS, draws)], self.options.tests)
            outputs = task.data["tests"]["outputs"]
            if any(output != outputs[0] for output in outputs):
                return task
        raise ValueError(f"{ATTEMPTS_MAX} problems have a constant answer")


def _problem(parts: list[Part], tests: int) -> Task:
    """The first list is empty. Equal problems have equal tests: no program is judged twice."""
    expression = "xs"
    for part in parts:
        expression = part.code.replace("xs", expression)
    source = f"solve=lambda xs:{expression}"
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # this file's own text, which needs no sandbox
    draws = Draws("swarm/2/code-tests", digest("swarm/2/code-problem", source.encode()))
    inputs = [[], *(_numbers(draws) for _ in range(tests - 1))]
    outputs = [namespace["solve"](list(xs)) for xs in inputs]
    data = {"tests": {"inputs": [[xs] for xs in inputs], "outputs": outputs, "fn_name": "solve"}}
    return Task("; ".join(part.words for part in parts) + ">", source, data)


def _filled(parts: tuple[Part, ...], draws: Draws) -> Part:
    part = parts[draws.below(len(parts))]
    k = part.least + draws.below(PARAMETERS)
    return Part(part.words.format(k=k), part.code.format(k=k))


def _numbers(draws: Draws) -> list[int]:
    length = 1 + draws.below(NUMBERS_MAX)
    return [draws.below(2 * VALUE_MAX + 1) - VALUE_MAX for _ in range(length)]
