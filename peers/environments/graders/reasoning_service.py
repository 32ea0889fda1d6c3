"""The process behind the grader `reasoning-gym`: it scores answers to entries of its data sets."""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import create_dataset

ANSWER_CHARACTERS_MAX = 20_000
EVALUATED_CHARACTERS_MAX = 400
POWERS_MAX = 8

_ARITHMETIC = r"(?:[0-9+\-/() \n]|(?<!\*)\*(?!\*))*"
_SYMBOLIC = (
    r"(?:[0-9+\-/() \n]|(?<=\d)\.(?=\d)|(?<!\*)\*(?!\*)"
    r"|\*\*(?:\d\d?|\(-?\d\d?(?:/\d\d?)?\))(?![\d.]|\s*\*\*)"
    r"|\b(?:[A-Za-z]|sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|exp|log|sqrt|Abs|pi)\b)*"
)
EVALUATED = {
    "binary_matrix": r"[0-9,\[\] \n]*",
    "countdown": _ARITHMETIC,
    "intermediate_integration": _SYMBOLIC,
    "n_queens": r"[Q_,'\"\[\] \n]*",
    "polynomial_multiplication": _SYMBOLIC,
    "puzzle24": _ARITHMETIC,
    "simple_integration": _SYMBOLIC,
    "spiral_matrix": r"[0-9,\[\] \n-]*",
    "string_insertion": r"[A-E,'\"\[\] \n]*",
}
"""Data sets whose scorers evaluate an answer as Python, and the answers that may be evaluated."""


class ReasoningService:
    """Answers requests of the grader."""

    def __init__(self) -> None:
        warnings.simplefilter("ignore")

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        name, text = request["dataset"], request["text"]
        if len(text) > ANSWER_CHARACTERS_MAX:
            return {"reason": "too long"}
        if name in EVALUATED and not may_be_evaluated(name, text):
            return {"reason": "unreadable"}
        dataset = _dataset(name)
        try:
            return {"score": float(dataset.score_answer(text, request["entry"]))}
        except MemoryError:
            raise
        except Exception:  # on the answer
            return {"reason": "unreadable"}


@lru_cache(16)
def _dataset(name: str) -> Any:
    return create_dataset(name, seed=0, size=1)


def may_be_evaluated(name: str, text: str) -> bool:
    """Whether an answer holds nothing but what it needs, and no power that takes long."""
    return (
        len(text) <= EVALUATED_CHARACTERS_MAX
        and text.count("**") <= POWERS_MAX
        and len(re.findall(r"\)\s*\*\*", text)) <= 2
        and re.fullmatch(EVALUATED[name], text) is not None
    )
