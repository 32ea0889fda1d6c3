"""The environment `code`: a completion is a Python program, right if it passes every hidden test.

The program runs in the sandbox, the comparison outside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from peers.environments.code.problems import STEPS_MAX, Style, make_problem
from peers.environments.interface import SingleTurn, Task, Tasks, Transcript
from peers.environments.tasks import Generated
from peers.sandbox import Limits, Outcome, Program, run

TESTS_MAX = 64
SOURCE_CHARACTERS_MAX = 1 << 16
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
"""A block of code in Markdown."""


class CodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How hard the problems are, and how they are tested."""

    steps: Annotated[int, Meta(ge=1, le=STEPS_MAX)] = 2
    """Operations on the list, one after another."""
    style: Literal["function", "stdin", "both"] = "both"
    """Whether a solution is a function, or a program that reads standard input."""
    tests: Annotated[int, Meta(ge=2, le=TESTS_MAX)] = 8
    cpu_seconds: Annotated[float, Meta(gt=0, le=60)] = 4.0
    """CPU time for all tests of a completion together; a right solution takes about 0.1 s."""
    memory_mib: Annotated[int, Meta(ge=64, le=4096)] = 256


class Code(SingleTurn):
    """Rewards a program that passes all hidden tests; passing some is worth nothing."""

    name = "code"
    version = "1"
    Options = CodeOptions
    options: CodeOptions

    def __init__(
        self,
        options: CodeOptions = CodeOptions(),  # noqa: B008
        run_program: Callable[[Program, Limits], Outcome] = run,
    ) -> None:
        super().__init__(options)
        self._run = run_program
        self._styles: tuple[Style, ...] = (
            ("function", "stdin") if options.style == "both" else (options.style,)
        )
        self.call_seconds = 10.0 + 5.0 * options.cpu_seconds
        self._limits = Limits(
            seconds=5.0 * options.cpu_seconds,
            cpu_seconds=options.cpu_seconds,
            memory_bytes=options.memory_mib << 20,
            processes=4,
        )

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> float:
        """1.0 for a finished program that passes all hidden tests, else 0.0.

        Raises `UserError` where no sandbox works, and `SandboxError` where it fails: neither says
        anything about the program.
        """
        source = program_in(transcript.text)
        if not transcript.finished or not source.strip() or len(source) > SOURCE_CHARACTERS_MAX:
            return 0.0
        style, cases = task.data["style"], task.data["cases"]
        inputs = [case["numbers"] for case in cases]
        request = {"style": style, "source": source, "inputs": inputs}
        stdin = json.dumps(request).encode()
        outcome = self._run(Program(source=_harness(), stdin=stdin), self._limits)
        if outcome.status != "exited" or outcome.code != 0:
            return 0.0
        results = _decoded(outcome.stdout)
        if style == "stdin":
            # Line ends and spacing are not part of the task.
            results = [" ".join(result.split()) for result in results]
        return float(results == [case["expected"] for case in cases])

    def _make(self, randomness: bytes) -> Task:
        options = self.options
        problem = make_problem(randomness, options.steps, self._styles, options.tests)
        return Task(
            prompt=problem.statement,
            answer=problem.solution,
            data={"style": problem.style, "cases": msgspec.to_builtins(problem.cases)},
        )


def program_in(text: str) -> str:
    """The last block of code in a completion, or the whole completion if it has none."""
    blocks = FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def _decoded(stdout: bytes) -> list[str]:
    """The harness's results; nothing for any other output, which a program may have forged."""
    try:
        return msgspec.json.decode(stdout, type=list[str])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


@cache
def _harness() -> str:
    return Path(__file__).with_name("harness.py").read_text(encoding="utf-8")
