"""Arithmetic with a tool, in two turns: too hard for a small model's head, easy with a calculator.

`428*19>` asks for the product. The model calls the tool by writing `428*19=` and ending its turn;
the environment answers `8132>`; the model repeats `8132` and ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from peers.environments.base import Split, Task, draw

CALL = re.compile(r"([0-9]{1,6})([*+])([0-9]{1,6})=")
"""A tool call; it must be the whole text of a model segment."""


class CalculatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How hard the arithmetic is."""

    digits: Annotated[int, Meta(ge=1, le=6)] = 3
    """Largest number of digits in each operand; operands have no leading zeros."""


class Calculator:
    """Rewards the right answer if the model called the tool before it."""

    name = "calculator"
    version = "1"
    Options = CalculatorOptions

    def __init__(self, options: CalculatorOptions = CalculatorOptions()) -> None:  # noqa: B008
        self._options = options

    def task(self, seed: bytes, split: Split = "train") -> Task:
        """Draw a sum or a product, uniform over the prompts of the split (`Environment.task`)."""
        return draw(seed, split, self._make)

    def answer(self, task: Task, turns: Sequence[str]) -> str | None:
        """The result of a well-formed tool call, once per episode; see `MultiTurn.answer`."""
        return f"{result}>" if len(turns) == 1 and (result := _called(turns[0])) else None

    def episode_reward(self, task: Task, turns: Sequence[str], finished: bool) -> float:
        """1.0 for the right answer after a call of the task's own expression, 0.0 otherwise."""
        expression = task.prompt.removesuffix(">")
        used = len(turns) == 3 and turns[0] == f"{expression}="
        return float(used and finished and turns[-1] == task.answer)

    def reward(self, task: Task, completion_text: str, finished: bool) -> float:
        """Always 0.0: a single turn holds no tool call; see `Environment.reward`."""
        return 0.0

    def _make(self, randomness: bytes) -> Task:
        # 256 bits modulo 2·10^12 favour no task by more than 1e-64.
        number = int.from_bytes(randomness, "big")
        number, left = divmod(number, 10**self._options.digits)
        number, right = divmod(number, 10**self._options.digits)
        expression = f"{left}{'*+'[number % 2]}{right}"
        return Task(prompt=f"{expression}>", answer=_called(f"{expression}="))


def _called(text: str) -> str:
    """The result of the tool call `text`; empty when `text` is not a tool call."""
    match = CALL.fullmatch(text)
    if match is None:
        return ""
    left, right = int(match[1]), int(match[3])
    return str(left * right if match[2] == "*" else left + right)
