"""The grader `code`: Python that a model wrote, run against hidden tests.

The program runs in the sandbox, the comparison outside it."""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import blake3
import msgspec
from msgspec import Meta

from peers.environments.graders import Grader, valid, zero
from peers.environments.graders.code_tests import TESTS_MAX, Tests, canonical, read_tests
from peers.environments.graders.pool import ProcessFailed, ServiceError, pool_of
from peers.environments.interface import Grade, NotGradable
from peers.sandbox import Limits, Outcome, Program, run

# Blocks of code in Markdown as models write it, and which of them may be a program.
#
# A model writes more than CommonMark allows: a fence behind text or a list's number, code that ends
# on the line of its closing fence, a whole block on one line, a tag on a line of its own. All of it
# takes time in proportion to the text.

Kind = Literal["python", "untagged", "other"]

CANDIDATES_MAX = 32
"""Blocks of one text that may be its program: the last ones."""
DEPTH_MAX = 4
"""Blocks of Markdown within each other."""

_PYTHON = re.compile(
    r"[\s{.]*(?:language-|lang(?:uage)?\s*[=:]\s*)?[\"']?"
    r"(?:[ic]?python|pypy|py)[\d.]*(?![a-z]|-?(?:repl|console|traceback))"
    r"|[\w./-]{1,100}\.py\b"
)
"""A tag of Python: `python`, `Python3`, `py`, `pypy3`, `{.python .numberLines}`, `main.py`."""
_MARKDOWN = re.compile(r"[\s{.]*(?:markdown|md)\b")
_QUOTE = re.compile(r"^[ \t]*>[ \t]?", re.MULTILINE)
_END_OF_LINE = re.compile(r"\r\n?")


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class _Fence:
    """A line that may open a block."""

    mark: str
    info: str
    is_quoted: bool

    def is_closed_by(self, line: str) -> bool:
        """Whether a line ends the block: the fence, perhaps behind the last line of code."""
        end = line.rstrip()
        run = len(end) - len(end.rstrip(self.mark[0]))
        alone = run == len(end.lstrip(" \t>"))
        return run >= len(self.mark) and (alone or self.mark[0] == "`")


def candidates(text: str) -> list[str]:
    """What may be the program in a completion, the best first.

    The whole text if it is Python; else the last block that is tagged as Python, or one before it;
    else the same of blocks without a tag; else of others. A block that is never closed is none."""
    text = _END_OF_LINE.sub("\n", text.removeprefix("\ufeff"))
    found = blocks(text)[-CANDIDATES_MAX:]
    kinds: tuple[Kind, ...] = ("python", "untagged", "other")
    ordered = [b.text for kind in kinds for b in reversed(found) if b.kind == kind]
    return [each for each in (_dedented(text), *ordered) if each.strip()]


def is_python(tag: str) -> bool:
    """Whether a block's tag, or a record's word for a language, is Python's."""
    return _PYTHON.match(tag.strip().lower()) is not None


def blocks(text: str, depth: int = 0) -> list[Block]:
    """The closed blocks of a text with the line ends of Unix, in order."""
    found: list[Block] = []
    fence: _Fence | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        if fence is not None and fence.is_closed_by(line):
            last = line.rstrip().rstrip(fence.mark[0])
            found += _closed(fence, [*lines, last] if last.strip(" \t>") else lines, depth)
            fence = None
            continue
        opening = _opening(line)
        # A tagged fence within a block: the block before it was never closed.
        if opening is not None and (
            fence is None or (opening.info and len(opening.mark) >= len(fence.mark))
        ):
            fence, lines = opening, []
        elif fence is not None:
            lines.append(line)
        elif "```" in line:
            found += _inline(line)
    return found


def _opening(line: str) -> _Fence | None:
    start = line.lstrip(" \t>")
    quoted = ">" in line[: len(line) - len(start)]
    tildes = len(start) - len(start.lstrip("~"))
    if tildes >= 3:
        return _Fence("~" * tildes, start[tildes:].strip(), quoted)
    head, tick, info = line.rpartition("`")
    before = (head + tick).rstrip("`")
    ticks = len(head + tick) - len(before)
    if ticks < 3 or "```" in before:
        return None
    return _Fence("`" * ticks, info.strip(), quoted)


def _closed(fence: _Fence, lines: list[str], depth: int) -> list[Block]:
    text = "".join(f"{line}\n" for line in lines)
    if fence.is_quoted:
        text = _QUOTE.sub("", text)
    info = fence.info.lower()
    if _MARKDOWN.match(info) and depth < DEPTH_MAX:
        return blocks(text, depth + 1)
    first, _, rest = text.partition("\n")
    if not info and first.strip() and _PYTHON.fullmatch(first.strip().lower()):
        return [Block("python", _dedented(rest))]
    kind: Kind = "python" if is_python(info) else "other" if info else "untagged"
    return [Block(kind, _dedented(text))]


def _inline(line: str) -> list[Block]:
    content = line.rstrip().rstrip("`").rpartition("```")[2].strip()
    tag, _, rest = content.partition(" ")
    if _PYTHON.fullmatch(tag.lower()):
        return [Block("python", rest.strip())]
    return [Block("untagged", content)]


def _dedented(text: str) -> str:
    """The text without the indentation of its first line, where lines have it."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    indentation = first[: len(first) - len(first.lstrip(" \t"))]
    if not indentation:
        return text
    return "\n".join(line.removeprefix(indentation) for line in text.split("\n"))


SYNTAX = "peers.environments.graders.syntax_service:SyntaxService"
KNOWN_MAX = 10_000
SOURCE_CHARACTERS_MAX = 1 << 16
START_CPU_SECONDS = 0.01
"""CPU time to start one test, which is not the program's own."""
WALL_PER_CPU = 5.0
"""Wall time of a program, in units of its CPU time, so that a busy machine decides no reward."""
FIRST_BATCH, BATCH_GROWTH = 16, 8
"""Tests of a program that run before their results are looked at, and how this grows."""
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
    """Rewards a program that passes all tests in `data`; passing some is worth nothing."""

    name = "code"
    takes_lists = True
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
        return 10.0 + WALL_PER_CPU * self._cpu_seconds(TESTS_MAX)

    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        """As of `Grader`; raises `UserError` without a sandbox, `SandboxError` if one fails."""
        tests = self._tests(data)
        if (source := self._program(valid(text), tests.fn_name)) is None:
            return zero("no program")
        whole = canonical([source, tests.fn_name, tests.inputs, tests.accepted])
        key = blake3.blake3(whole.encode()).digest()
        if key not in self._known:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[key] = self._judged(tests, source)
        return self._known[key]

    def check(self, answer: str, data: Mapping[str, Any]) -> None:
        self._tests(data)

    @staticmethod
    def _tests(data: Mapping[str, Any]) -> Tests:
        language = data.get("language")
        if isinstance(language, str) and language and not is_python(language):
            raise NotGradable(
                f"the task asks for a program in {language[:40]!r}, and the grader 'code' runs "
                "Python only; leave such rows out"
            )
        return read_tests(data)

    def _judged(self, tests: Tests, source: str) -> Grade:
        """Run the tests in batches that grow, and compare each batch's results outside the sandbox:
        most wrong programs fail one of the first tests, and need not run against thousands."""
        count, start, size, used = len(tests.inputs), 0, FIRST_BATCH, 0.0
        while start < count:
            began = time.monotonic()
            batch = tests.between(start, start + size)
            left = max(START_CPU_SECONDS, self._cpu_seconds(count) - used)
            grade, cpu_seconds = self._judged_at_once(batch, source, left)
            if not grade.reward:
                return grade
            used += max(cpu_seconds, (time.monotonic() - began) / WALL_PER_CPU)
            start, size = start + size, size * BATCH_GROWTH
        return Grade(1.0)

    def _judged_at_once(self, tests: Tests, source: str, cpu_seconds: float) -> tuple[Grade, float]:
        """The grade for some tests, and the CPU time that they took of what is left."""
        request = {
            "function": tests.fn_name,
            "source": source,
            "inputs": tests.inputs,
            "cpu_seconds": self.options.cpu_seconds,
            "result_bytes": tests.result_bytes,
            "all_results_bytes": tests.all_results_bytes,
        }
        stdin = json.dumps(request).encode()
        limits = Limits(
            seconds=WALL_PER_CPU * cpu_seconds,
            cpu_seconds=cpu_seconds,
            memory_bytes=(self.options.memory_mib << 20) + MEMORY_PER_INPUT_BYTE * len(stdin),
            processes=4,
            output_bytes=JSON_BYTES_PER_BYTE * tests.all_results_bytes + (1 << 20),
            files_bytes=(16 << 20) + len(stdin) + tests.all_results_bytes,
        )
        outcome = self._run(Program(source=_harness(), stdin=stdin), limits)
        return self._grade_of(outcome, tests), outcome.cpu_seconds

    @staticmethod
    def _grade_of(outcome: Outcome, tests: Tests) -> Grade:
        if outcome.status in ("timeout", "memory"):
            return zero(outcome.status)
        if outcome.status != "exited" or outcome.code != 0:
            return zero("failed")
        found = _decoded(outcome.stdout)
        if len(found.results) < len(tests.inputs):
            return zero("timeout" if found.end == "timeout" else "failed")
        return Grade(float(tests.passed_by(found.results)))

    def _cpu_seconds(self, tests: int) -> float:
        options = self.options
        return max(options.cpu_seconds, options.total_cpu_seconds) + START_CPU_SECONDS * tests

    def _program(self, text: str, function: str) -> str | None:
        sources = [each for each in candidates(text) if len(each) <= SOURCE_CHARACTERS_MAX]
        pool = pool_of(SYNTAX)
        try:
            index = pool.ask({"sources": sources, "function": function}) if sources else -1
        except (ProcessFailed, ServiceError):  # the sandbox will show
            return program_in(text)
        return sources[index] if index >= 0 else None


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
