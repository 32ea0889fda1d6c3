"""The grader `code`: Python that a model wrote, run against hidden tests.

The program runs in the sandbox, the comparison outside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import blake3
import msgspec
from msgspec import Meta

from peers.environments.graders.base import Grader, valid, zero
from peers.environments.graders.code_tests import TESTS_MAX, Tests, canonical, read_tests
from peers.environments.graders.fences import candidates, is_python
from peers.environments.graders.pool import ProcessFailed, ServiceError, pool_of
from peers.environments.interface import Grade, NotGradable
from peers.sandbox import Limits, Outcome, Program, run

SYNTAX = "peers.environments.graders.syntax_service:SyntaxService"
KNOWN_MAX = 10_000
SOURCE_CHARACTERS_MAX = 1 << 16
START_CPU_SECONDS = 0.01
"""CPU time to start one test, which is not the program's own."""
WALL_PER_CPU = 5.0
"""Wall time of a program, in units of its CPU time, so that a busy machine decides no reward."""
JSON_BYTES_PER_BYTE = 2
"""A result as JSON: line ends and quotes take two characters."""
MEMORY_PER_INPUT_BYTE = 8
"""Memory of the process that reads the tests and starts the program."""


class CodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a program may use."""

    cpu_seconds: Annotated[float, Meta(gt=0, le=60)] = 4.0
    """CPU time for one test; a right solution takes about 0.1 s."""
    total_cpu_seconds: Annotated[float, Meta(gt=0, le=600)] = 10.0
    """CPU time for all tests of a completion together, if more than `cpu_seconds`."""
    memory_mib: Annotated[int, Meta(ge=64, le=4096)] = 256


class _Found(msgspec.Struct):
    """What the harness prints; a program may have forged it."""

    results: list[str]
    end: str = ""
    """Why a test has no result."""


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
        return 10.0 + self._limits(TESTS_MAX).seconds

    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        """See `Grader.grade`.

        Raises `UserError` where no sandbox works, and `SandboxError` where it fails: neither says
        anything about the program.
        """
        language = data.get("language")
        if isinstance(language, str) and language and not is_python(language):
            raise NotGradable(
                f"the task asks for a program in {language[:40]!r}, and the grader 'code' runs "
                "Python only; leave such rows out"
            )
        tests = read_tests(data.get("tests"), str(data.get("fn_name") or ""))
        source = self._program(valid(text), tests.fn_name)
        if source is None:
            return zero("no program")
        stdin = json.dumps(self._request(tests, source)).encode()
        key = blake3.blake3(stdin + canonical(tests.outputs).encode()).digest()
        if key not in self._known:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[key] = self._judged(tests, stdin)
        return self._known[key]

    def _request(self, tests: Tests, source: str) -> dict[str, Any]:
        """What the harness reads."""
        return {
            "function": tests.fn_name,
            "source": source,
            "inputs": tests.inputs,
            "cpu_seconds": self.options.cpu_seconds,
            "result_bytes": tests.result_bytes,
            "all_results_bytes": tests.all_results_bytes,
        }

    def _judged(self, tests: Tests, stdin: bytes) -> Grade:
        limits = self._limits(len(tests.inputs), tests.all_results_bytes, len(stdin))
        outcome = self._run(Program(source=_harness(), stdin=stdin), limits)
        if outcome.status in ("timeout", "memory"):
            return zero(outcome.status)
        if outcome.status != "exited" or outcome.code != 0:
            return zero("failed")
        found = _decoded(outcome.stdout)
        if len(found.results) < len(tests.inputs):
            return zero("timeout" if found.end == "timeout" else "failed")
        return Grade(float(tests.passed_by(found.results)))

    def _program(self, text: str, function: str) -> str | None:
        """The program in a completion; None without one."""
        sources = [each for each in candidates(text) if len(each) <= SOURCE_CHARACTERS_MAX]
        pool = pool_of(SYNTAX, self.timeout_seconds, self.max_parallel)
        try:
            index = pool.ask({"sources": sources, "function": function}) if sources else -1
        except (ProcessFailed, ServiceError):  # the sandbox will show
            return program_in(text)
        return sources[index] if index >= 0 else None

    def _limits(self, tests: int, results_bytes: int = 0, input_bytes: int = 0) -> Limits:
        options = self.options
        cpu_seconds = max(options.cpu_seconds, options.total_cpu_seconds)
        cpu_seconds += START_CPU_SECONDS * tests
        return Limits(
            seconds=WALL_PER_CPU * cpu_seconds,
            cpu_seconds=cpu_seconds,
            memory_bytes=(options.memory_mib << 20) + MEMORY_PER_INPUT_BYTE * input_bytes,
            processes=4,
            output_bytes=JSON_BYTES_PER_BYTE * results_bytes + (1 << 20),
            files_bytes=(16 << 20) + input_bytes + results_bytes,
        )


def program_in(text: str) -> str:
    """The best candidate that stands in a block, or the whole text if there is none."""
    return next(iter([*candidates(text)[1:], text]))


def _decoded(stdout: bytes) -> _Found:
    """The harness's results; nothing for any other output, which a program may have forged."""
    try:
        return msgspec.json.decode(stdout, type=_Found)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Found([])


@cache
def _harness() -> str:
    return Path(__file__).with_name("code_harness.py").read_text(encoding="utf-8")
