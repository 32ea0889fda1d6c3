"""The environment `tools`: arithmetic that is easy with a calculator or a Python interpreter."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from peers.environments.interface import Episodes, Grade, Task, Tasks, Transcript
from peers.environments.tasks import Generated
from peers.sandbox import Limits, Outcome, Program, run
from swarm.rollouts.seeds import digest

# Calls of tools in a model's text, and their results.
#
# A call is at the end of a turn: `<calc>12*34</calc>`, or the form of Hermes and Qwen,
# `<tool_call>{"name": "calc", "arguments": {"input": "12*34"}}</tool_call>`. The result follows as
# `<result>408</result>`.

CLOSING = re.compile(r"</([a-z_]{1,20})>\s*\Z")
"""The end of the last element of a text; its beginning is searched for backwards, because one
pattern for both takes quadratic time on a hostile text."""

EXPRESSION = re.compile(r"[0-9+\-*/%(). ]{1,200}")
DIGITS_MAX = 1_000
"""Digits of a calculator's number; a longer one is an error."""
DECIMALS = Context(prec=12)

OUTPUT_CHARACTERS_MAX = 2_000
"""Output of a Python program that the model sees."""
PYTHON_LIMITS = Limits(seconds=15.0, cpu_seconds=4.0, memory_bytes=256 << 20, processes=4)

Runner = Callable[[Program, Limits], Outcome]


class _Json(msgspec.Struct):
    """The content of a `<tool_call>`."""

    name: str
    arguments: dict[str, Any]


def called(text: str, tools: Sequence[str]) -> tuple[str, str] | None:
    """(tool, its input) of the call that ends a text; None without a call of one of `tools`."""
    text = text[-(1 << 16) :]
    match = CLOSING.search(text)
    opening = f"<{match[1]}>" if match is not None else ""
    begins = text.rfind(opening, 0, match.start()) if match is not None else -1
    if match is None or begins < 0:
        return None
    name, given = match[1], text[begins + len(opening) : match.start()]
    if name == "tool_call":
        try:
            call = msgspec.json.decode(given.strip().encode("utf-8", "replace"), type=_Json)
        except msgspec.MsgspecError:
            return None
        values = list(call.arguments.values())
        if len(values) != 1 or not isinstance(values[0], str):
            return None
        name, given = call.name, values[0]
    return (name, given) if name in tools else None


def calculate(text: str) -> str:
    """The value of an expression of numbers, + - * / // % and brackets, or `error: …`."""
    expression = text.strip()
    if not EXPRESSION.fullmatch(expression) or "**" in expression:
        return "error: not an expression"
    try:
        value = _value(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an expression"
    if value.denominator == 1:
        return str(value.numerator)
    return format(DECIMALS.divide(Decimal(value.numerator), Decimal(value.denominator)), "f")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            found = Fraction(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            found = -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            found = _value(inner)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATIONS:
            found = Fraction(_OPERATIONS[type(operator)](_value(left), _value(right)))
        case _:
            raise ValueError("another construct")
    if max(abs(found.numerator), found.denominator) >= 10**DIGITS_MAX:
        raise ValueError("too large")
    return found


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def run_python(source: str, run: Runner) -> str:
    """The output of a program in the sandbox, or `error: …`; raises as `run` does."""
    if not source.strip():
        return "error: the program is empty"
    outcome = run(Program(source=source), PYTHON_LIMITS)
    output = outcome.stdout.decode("utf-8", "replace")[:OUTPUT_CHARACTERS_MAX]
    if outcome.status != "exited":
        return f"{output}error: {outcome.status}"
    if outcome.code:
        last = outcome.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"{output}error: {last[:200]}"
    return output.rstrip("\n")


WORDS = (
    "Compute {expression}. You may use tools: end your turn with a call, and its result follows as "
    "<result>...</result>.{tools} At the end write the number alone.\n"
)
TOOLS = {
    "calc": " <calc>12*34</calc> computes an expression.",
    "python": " <python>print(12*34)</python> runs a Python program and shows its output.",
}
LAST_NUMBER = re.compile(r"(-?[0-9]+)[^0-9]*\Z")


class ToolsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools there are, and how hard the arithmetic is."""

    tools: Annotated[list[Literal["calc", "python"]], Meta(min_length=1, max_length=2)] = (
        msgspec.field(default_factory=lambda: ["calc"])
    )
    """A run with `python` must be served: two runs of a program may print different text."""
    digits: Annotated[int, Meta(ge=1, le=9)] = 3
    """Largest number of digits of an operand."""
    operations: Annotated[int, Meta(ge=1, le=16)] = 2
    calls: Annotated[int, Meta(ge=1, le=16)] = 4
    """Calls that are answered in an episode."""
    statement: Literal["words", "bare"] = "words"
    """bare: the prompt is the expression and `>`, for a policy of characters."""
    must_call: bool = False
    """Whether the right answer earns nothing unless a tool gave a result before it."""


@dataclass
class _Calls:
    answered: int = 0


class Tools(Episodes):
    """Rewards the right number at the end, whatever tools found it."""

    name = "tools"
    version = "1"
    safe_for_strangers = True
    Options = ToolsOptions
    options: ToolsOptions

    def __init__(
        self,
        options: ToolsOptions = ToolsOptions(),  # noqa: B008
        run_program: Runner = run,
    ) -> None:
        super().__init__(options)
        self.replayable = "python" not in options.tools
        self._tools: dict[str, Callable[[str], str]] = {
            "calc": calculate,
            "python": lambda source: run_python(source, run_program),
        }

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def start(self, task: Task) -> _Calls:
        return _Calls()

    def step(self, state: _Calls, text: str) -> str | None:
        """The result of the call that ends the text; None without a call or beyond `calls`."""
        call = called(text, self.options.tools)
        if call is None or state.answered >= self.options.calls:
            return None
        state.answered += 1
        name, given = call
        return f"<result>{self._tools[name](given)}</result>"

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        match = LAST_NUMBER.search(transcript.text[-200:])
        right = transcript.finished and match is not None and match[1] == task.answer
        observed = [turn.text for turn in transcript.turns if turn.kind == "environment"]
        used = any("<result>error" not in text for text in observed)
        earned = right and (used or not self.options.must_call)
        return Grade(float(earned), {"answer": float(right), "tool": float(used)})

    def _make(self, randomness: bytes) -> Task:
        # At most 10^153 · 3^16 expressions: 1024 bits modulo that favour none measurably.
        blocks = (digest("swarm/1/tools", randomness, bytes([block])) for block in range(4))
        number = int.from_bytes(b"".join(blocks), "big")
        parts: list[str] = []
        for index in range(self.options.operations + 1):
            if index:
                number, operation = divmod(number, 3)
                parts.append("+-*"[operation])
            number, operand = divmod(number, 10**self.options.digits)
            parts.append(str(operand))
        expression = "".join(parts)
        prompt = f"{expression}>"
        if self.options.statement == "words":
            tools = "".join(TOOLS[name] for name in self.options.tools)
            prompt = WORDS.format(expression=expression, tools=tools)
        tool, answer = self.options.tools[0], calculate(expression)
        given = expression if tool == "calc" else f"print({expression})"
        return Task(prompt, answer, demonstration=(f"<{tool}>{given}</{tool}>", answer))
