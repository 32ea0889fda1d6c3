r"""The environment `math`: the last `\boxed{…}` of a completion must equal the answer.

math-verify compares the two, numerically and symbolically (see the grader `math`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from peers.environments.graders.math import Math as Grader
from peers.environments.interface import Grade, SingleTurn, Task, Tasks, Transcript
from peers.environments.math_problems import LEVELS, make_problem
from peers.environments.tasks import Generated

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
