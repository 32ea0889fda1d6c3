"""The environment `math`: the last `\boxed{…}` of a completion must equal the answer.

math-verify compares the two, numerically and symbolically (see the grader `math`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Annotated

import msgspec
from msgspec import Meta

from peers.environments.graders.math import Math as Grader
from peers.environments.interface import Grade, SingleTurn, Task, Tasks, Transcript
from peers.environments.tasks import Generated
from swarm.rollouts.seeds import Draws

# Generated problems of school mathematics with answers in LaTeX, for tests and demos.
#
# A run on real problems names a file of them; see docs/environments.md.

LEVELS = 3


def make_problem(randomness: bytes, level: int) -> tuple[str, str]:
    """(question, answer) of level 1, 2 or 3, drawn uniformly from its kinds."""
    draws = Draws("swarm/1/math", randomness)
    kinds = KINDS[level - 1]
    return kinds[draws.below(len(kinds))](draws)


def _nonzero(draws: Draws, magnitude: int) -> int:
    drawn = draws.below(2 * magnitude) - magnitude
    return drawn if drawn < 0 else drawn + 1


def _fraction(numerator: int, denominator: int) -> str:
    shared = gcd(numerator, denominator) * (-1 if denominator < 0 else 1)
    numerator, denominator = numerator // shared, denominator // shared
    if denominator == 1:
        return str(numerator)
    sign = "-" if numerator < 0 else ""
    return f"{sign}\\frac{{{abs(numerator)}}}{{{denominator}}}"


def _polynomial(*coefficients: int) -> str:
    """`ax^2+bx+c` from its coefficients, the highest power first; not all are 0."""
    text = ""
    for power, c in zip(range(len(coefficients) - 1, -1, -1), coefficients, strict=True):
        if c:
            shown = "" if abs(c) == 1 and power else str(abs(c))
            text += ("-" if c < 0 else "+") + shown + ("", "x", f"x^{power}")[min(power, 2)]
    return text.removeprefix("+")


def _sum(draws: Draws) -> tuple[str, str]:
    a, b, c = (draws.below(90) + 10 for _ in range(3))
    return f"Compute {a} + {b} - {c}.", str(a + b - c)


def _product(draws: Draws) -> tuple[str, str]:
    a, b = draws.below(90) + 10, draws.below(8) + 2
    return f"Compute {a} \\cdot {b}.", str(a * b)


def _fractions(draws: Draws) -> tuple[str, str]:
    a, b, c, d = _nonzero(draws, 9), draws.below(8) + 2, draws.below(9) + 1, draws.below(8) + 2
    shown = f"{_fraction(a, b)} + {_fraction(c, d)}"
    return f"Compute {shown}.", _fraction(a * d + c * b, b * d)


def _linear(draws: Draws) -> tuple[str, str]:
    a, b, c = draws.below(8) + 2, _nonzero(draws, 20), _nonzero(draws, 20)
    return f"Solve {_polynomial(a, b)} = {c} for x.", _fraction(c - b, a)


def _parameters(draws: Draws) -> tuple[str, str]:
    a, b = draws.below(8) + 2, _nonzero(draws, 9)
    return f"Solve {a}x {b:+d}y = z for x.", f"\\frac{{z{-b:+d}y}}{{{a}}}"


def _roots(draws: Draws) -> tuple[str, str]:
    first = _nonzero(draws, 9)
    second = first + draws.below(8) + 1
    question = f"Find all solutions of {_polynomial(1, -first - second, first * second)} = 0."
    return question, f"\\{{{first}, {second}\\}}"


def _derivative(draws: Draws) -> tuple[str, str]:
    a, b, c = _nonzero(draws, 9), _nonzero(draws, 9), _nonzero(draws, 9)
    question = f"Differentiate {_polynomial(a, b, c, 0)} with respect to x."
    return question, _polynomial(3 * a, 2 * b, c)


Kind = Callable[[Draws], tuple[str, str]]
KINDS: tuple[tuple[Kind, ...], ...] = (
    (_sum, _product),
    (_fractions, _linear),
    (_parameters, _roots, _derivative),
)
"""The kinds of problem of each level."""


INSTRUCTION = "{problem} Put the final answer in \\boxed{}.\n"


class MathOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which problems, and how they are asked."""

    level: Annotated[int, Meta(ge=1, le=LEVELS)] = 1
    """1: sums and products; 2: fractions and linear equations; 3: symbolic answers."""
    instruction: Annotated[str, Meta(pattern=r"\{problem\}", max_length=4096)] = INSTRUCTION
    """Template of the prompt, with `{problem}`."""


class Math(SingleTurn):
    """Rewards a finished completion whose last box holds the answer."""

    name = "math"
    version = "1"
    safe_for_strangers = True
    Options = MathOptions
    options: MathOptions

    def __init__(self, options: MathOptions | None = None) -> None:
        super().__init__(options)
        self._grader = Grader()
        self.call_seconds = self._grader.call_seconds

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """See `Environment.grade`; raises as the grader."""
        return self._grader.grade_episode(task, transcript)

    def _make(self, randomness: bytes) -> Task:
        problem, answer = make_problem(randomness, self.options.level)
        prompt = self.options.instruction.replace("{problem}", problem)
        return Task(prompt, self._grader.completion(answer))
