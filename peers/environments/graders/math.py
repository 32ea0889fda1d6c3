r"""The grader `math`: the last `\boxed{…}` of a text, compared with the answer by math-verify.

What may cost time is bounded by what the answer looks like (`peers.environments.graders.latex`), so
that every validator decides alike. A clock decides nothing: an answer that passes these bounds and
takes `CPU_SECONDS` all the same is not gradable.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from peers.environments.graders.base import Grader, valid, zero
from peers.environments.graders.latex import boxed, too_complex
from peers.environments.graders.pool import ProcessFailed, ServiceError, pool_of
from peers.environments.graders.units import units_differ
from peers.environments.interface import Grade, NotGradable
from swarm.errors import UserError

CPU_SECONDS = 2.0
"""CPU time of math-verify for one answer. Nearly all take milliseconds."""
SERVICE = "peers.environments.graders.math_service:MathService"


class MathReply(msgspec.Struct, frozen=True):
    """What the process found out."""

    outcome: Literal[
        "equal",
        "different",
        "unreadable",
        "too complex",
        "unevaluated",
        "incomparable",
        "bad gold",
    ]


class MathOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How answers are compared."""

    evaluated: bool = True
    """Whether an answer that is a number must be written as one: otherwise `17+25` earns the reward
    of 42, and a model learns to repeat the question."""


class Math(Grader):
    """Rewards a boxed answer that equals the task's, numerically or symbolically."""

    name = "math"
    Options = MathOptions
    options: MathOptions

    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        given = boxed(valid(text))
        if given is None:
            return zero("no boxed answer")
        if too_complex(given):
            return zero("too complex")
        expected = boxed(answer) or answer
        if find_spec("math_verify") is None:
            raise UserError(
                "the grader 'math' needs math-verify, which is not installed here; type: "
                "pip install 'swarm-rl[math]'"
            )
        evaluated = self.options.evaluated
        request = {"gold_text": expected, "text": given, "evaluated": evaluated}
        pool = pool_of(SERVICE, self.timeout_seconds, self.max_parallel, CPU_SECONDS)
        try:
            reply = msgspec.convert(pool.ask(request), MathReply)
        except (ProcessFailed, ServiceError) as error:
            raise NotGradable(f"math-verify cannot judge {given[:80]!r}: {error}") from error
        if reply.outcome == "bad gold":
            raise NotGradable(
                f"the task's own answer {answer[:80]!r} is beyond the grader's bounds, or does not "
                "equal itself for math-verify; repair the data, or choose another grader"
            )
        if reply.outcome == "equal" and units_differ(expected, given):
            return zero("another unit")
        return Grade(1.0) if reply.outcome == "equal" else _zero(reply.outcome)

    def completion(self, answer: str) -> str:
        return answer if not answer or boxed(answer) is not None else f"\\boxed{{{answer}}}"


def _zero(outcome: str) -> Grade:
    return Grade(0.0) if outcome == "different" else zero(outcome)
