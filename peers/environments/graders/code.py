"""The grader `code`: Python that a model wrote, run against hidden tests.

The program runs in the sandbox, the comparison outside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import blake3
import msgspec
from msgspec import Meta

from peers.environments.graders.base import Grader, valid, zero
from peers.environments.graders.pool import ProcessFailed, ServiceError, pool_of
from peers.environments.interface import Grade, NotGradable
from peers.sandbox import Limits, Outcome, Program, run
from swarm.errors import DECODE_ERRORS

SYNTAX = "peers.environments.graders.syntax_service:SyntaxService"
TESTS_MAX = 1000
KNOWN_MAX = 10_000
SOURCE_CHARACTERS_MAX = 1 << 16
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
"""A block of code in Markdown."""


class CodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a program may use."""

    cpu_seconds: Annotated[float, Meta(gt=0, le=60)] = 4.0
    """CPU time for all tests of a completion together; a right solution takes about 0.1 s."""
    memory_mib: Annotated[int, Meta(ge=64, le=4096)] = 256


class Tests(msgspec.Struct, frozen=True):
    """Hidden tests, in the form that public data sets of programming problems have."""

    inputs: Annotated[list[Any], Meta(min_length=1, max_length=TESTS_MAX)]
    """Standard input of each test; with `fn_name`, the list of arguments of each call."""
    outputs: list[Any]
    """What a right program prints; with `fn_name`, what the function returns."""
    fn_name: str = ""
    """The function to call; empty for a program that reads standard input."""


class Code(Grader):
    """Rewards a program that passes all tests of `data["tests"]`; passing some is worth nothing."""

    name = "code"
    Options = CodeLimits
    options: CodeLimits

    def __init__(
        self,
        options: CodeLimits | None = None,
        run_program: Callable[[Program, Limits], Outcome] = run,
    ) -> None:
        super().__init__(options)
        self._run = run_program
        self._known: dict[bytes, Grade] = {}
        """Grades of programs with their tests: a policy writes the same program again and again."""

    @property
    def call_seconds(self) -> float:
        """See `Grader.call_seconds`."""
        return 10.0 + self._limits().seconds

    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        """See `Grader.grade`.

        Raises `UserError` where no sandbox works, and `SandboxError` where it fails: neither says
        anything about the program.
        """
        tests = _tests(data.get("tests"))
        source = program_in(valid(text))
        if not source.strip() or len(source) > SOURCE_CHARACTERS_MAX:
            return zero("no program")
        if not self._compiles(source):
            return zero("no program")
        request = {"function": tests.fn_name, "source": source, "inputs": tests.inputs}
        stdin = json.dumps(request).encode()
        key = blake3.blake3(stdin + json.dumps(tests.outputs).encode()).digest()
        if key not in self._known:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[key] = self._judged(tests, stdin)
        return self._known[key]

    def _judged(self, tests: Tests, stdin: bytes) -> Grade:
        outcome = self._run(Program(source=_harness(), stdin=stdin), self._limits())
        if outcome.status in ("timeout", "memory"):
            return zero(outcome.status)
        if outcome.status != "exited" or outcome.code != 0:
            return zero("failed")
        results = _decoded(outcome.stdout)
        if len(results) < len(tests.inputs):
            return zero("failed")
        plain = canonical if tests.fn_name else _words
        if not tests.fn_name:
            results = [_words(result) for result in results]
        return Grade(float(results == [plain(output) for output in tests.outputs]))

    def _compiles(self, source: str) -> bool:
        pool = pool_of(SYNTAX, self.timeout_seconds, self.max_parallel)
        try:
            return bool(pool.ask(source))
        except (ProcessFailed, ServiceError):  # the sandbox will show
            return True

    def _limits(self) -> Limits:
        return Limits(
            seconds=5.0 * self.options.cpu_seconds,
            cpu_seconds=self.options.cpu_seconds,
            memory_bytes=self.options.memory_mib << 20,
            processes=4,
        )


def program_in(text: str) -> str:
    """The last block of code in a completion, or the whole completion if it has none."""
    blocks = FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def canonical(value: Any) -> str:
    """JSON of a returned value; 1, 1.0 and true differ."""
    return json.dumps(value, separators=(",", ":"))


def _words(output: Any) -> str:
    """Printed text without its line ends and spacing, which are not part of a task."""
    return " ".join(str(output).split())


def _tests(given: Any) -> Tests:
    try:
        tests = (
            msgspec.json.decode(given, type=Tests)
            if isinstance(given, str)
            else msgspec.convert(given, Tests)
        )
    except DECODE_ERRORS as error:
        raise NotGradable(
            f"the task's tests {given!r:.80} are unreadable ({error}); they must be a table with "
            "inputs and outputs, and fn_name for a function"
        ) from error
    if len(tests.inputs) != len(tests.outputs):
        raise NotGradable(
            f"the task's tests have {len(tests.inputs)} inputs and {len(tests.outputs)} outputs; "
            "repair the data"
        )
    return tests


def _decoded(stdout: bytes) -> list[str]:
    """The harness's results; nothing for any other output, which a program may have forged."""
    try:
        return msgspec.json.decode(stdout, type=list[str])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


@cache
def _harness() -> str:
    return Path(__file__).with_name("code_harness.py").read_text(encoding="utf-8")
