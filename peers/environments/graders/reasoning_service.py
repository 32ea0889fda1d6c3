"""The process behind `reasoning-gym`: it draws tasks of its data sets, and scores answers.

A task is drawn anew for each score: from the name of its data set, its settings and a seed, and so
its entry need not travel.
"""

from __future__ import annotations

import copy
import random
import re
import warnings
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
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

BY_INDEX = ("arc_agi", "codeio", "figlet_font", "group_anagrams")
"""Data sets that read a large file when they are made; one is kept, and tasks drawn by index."""


class ReasoningService:
    """Answers requests of `peers.environments.reasoning_gym` and of the grader."""

    def __init__(self) -> None:
        warnings.simplefilter("ignore")

    def __call__(self, request: dict[str, Any]) -> Any:
        what = request.pop("what")
        if what == "score_entry":
            dataset = create_dataset(request["dataset"], seed=0, size=1)
            return _score(request["dataset"], dataset, request["entry"], request["text"])
        settings = msgspec.json.encode(request["settings"]).decode()
        drawn = request["dataset"], settings, request["seed"]
        if what == "draw":
            entry = _entry(*drawn)[1]
            answer = entry["answer"]
            return {"question": entry["question"], "answer": "" if answer is None else str(answer)}
        dataset, entry = _entry(*drawn)
        return _score(request["dataset"], dataset, copy.deepcopy(entry), request["text"])


@lru_cache(16)
def _kept(name: str, settings: str) -> Any:
    return create_dataset(name, seed=0, size=1, **msgspec.json.decode(settings))


@lru_cache(64)
def _entry(name: str, settings: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """(data set, entry) of a seed; equal in every process."""
    random.seed(seed)
    np.random.seed(seed)
    if name in BY_INDEX:
        dataset = _kept(name, settings)
        return dataset, dataset[seed]
    dataset = create_dataset(name, seed=seed, size=1, **msgspec.json.decode(settings))
    return dataset, dataset[0]


def _score(name: str, dataset: Any, entry: dict[str, Any], text: str) -> dict[str, Any]:
    if len(text) > ANSWER_CHARACTERS_MAX:
        return {"reason": "too long"}
    if name in EVALUATED and not may_be_evaluated(name, text):
        return {"reason": "unreadable"}
    try:
        return {"score": float(dataset.score_answer(text, entry))}
    except MemoryError:
        raise
    except Exception:  # on the answer: it scores the data set's own
        return {"reason": "unreadable"}


def may_be_evaluated(name: str, text: str) -> bool:
    """Whether an answer holds nothing but what it needs, and no power that takes long."""
    return (
        len(text) <= EVALUATED_CHARACTERS_MAX
        and text.count("**") <= POWERS_MAX
        and len(re.findall(r"\)\s*\*\*", text)) <= 2
        and re.fullmatch(EVALUATED[name], text) is not None
    )
