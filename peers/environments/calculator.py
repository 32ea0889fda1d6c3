"""Arithmetic with a tool, in two turns: too hard for a small model's head, easy with a calculator.

`428*19>` asks for the product. The model calls the tool by writing `428*19=` and ending its turn;
the environment answers `8132>`; the model repeats `8132` and ends."""

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from peers.environments.interface import Episodes, Task, Tasks, Transcript, as_text
from peers.environments.tasks import Generated

CALL = re.compile(r"([0-9]{1,6})([*+])([0-9]{1,6})=")
"""A tool call; it must be the whole text of a model segment."""


class CalculatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How hard the arithmetic is."""

    digits: Annotated[int, Meta(ge=1, le=6)] = 3
    """Largest number of digits in each operand; operands have no leading zeros."""


@dataclass
class _Calls:
    """What the calculator remembers of an episode."""

    answered: bool = False


class Calculator(Episodes):
    """Rewards the right answer if the model called the tool before it."""

    name = "calculator"
    version = "1"
    safe_for_strangers = True
    Options = CalculatorOptions
    options: CalculatorOptions

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def start(self, task: Task) -> _Calls:
        return _Calls()

    def step(self, state: _Calls, text: str) -> str | None:
        """The result of a well-formed tool call, once per episode."""
        result = "" if state.answered else _called(text)
        state.answered = True
        return f"{result}>" if result else None

    def grade(self, task: Task, transcript: Transcript) -> float:
        """1.0 for the right answer after a call of the task's own expression, 0.0 otherwise."""
        turns = transcript.turns
        called = len(turns) == 3 and turns[0].text == as_text(task.prompt).removesuffix(">") + "="
        return float(called and transcript.finished and transcript.text == task.answer)

    def _make(self, randomness: bytes) -> Task:
        # 256 bits modulo 2·10^12 favour no task by more than 1e-64.
        number = int.from_bytes(randomness, "big")
        number, left = divmod(number, 10**self.options.digits)
        number, right = divmod(number, 10**self.options.digits)
        expression = f"{left}{'*+'[number % 2]}{right}"
        result = _called(call := f"{expression}=")
        return Task(prompt=f"{expression}>", answer=result, demonstration=(call, result))


def _called(text: str) -> str:
    """The result of the tool call `text`; empty when `text` is not a tool call."""
    if (match := CALL.fullmatch(text)) is None:
        return ""
    left, right = int(match[1]), int(match[3])
    return str(left * right if match[2] == "*" else left + right)
