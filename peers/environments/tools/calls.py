"""Calls of tools in a model's text, and their results.

A call is at the end of a turn: `<calc>12*34</calc>`, or the form of Hermes and Qwen,
`<tool_call>{"name": "calc", "arguments": {"input": "12*34"}}</tool_call>`. The result follows
as `<result>408</result>`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import msgspec

from peers.sandbox import Limits, Outcome, Program

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
