"""Graders by name: what compares a completion's text with the answer of a task.

Those that need a foreign library call it in killable processes (`peers.environments.graders.pool`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import msgspec

from peers.environments.interface import Grade
from swarm.errors import UserError
from swarm.terminal.tables import struct_from_mapping

START_SECONDS = 60.0
"""Wall time to start a process and import a library, on a machine that may be busy."""


TIMEOUT_SECONDS = 30.0
"""Wall time for one answer, after which it is not gradable."""


class NoOptions(msgspec.Struct, frozen=True):
    """Of a grader that has none."""


class Grader(ABC):
    """Grades texts against answers; the same on every machine.

    If a text is at fault, a part of its grade names the reason (`zero`). A grader that cannot
    decide raises `NotGradable`: docs/environments.md says which is which."""

    name: ClassVar[str]
    Options: ClassVar[type[msgspec.Struct]]
    options: Any

    def __init__(self, options: Any = None) -> None:
        self.options = self.Options() if options is None else options

    @property
    def call_seconds(self) -> float:
        """Wall time that a call of `grade` may take: to start a process, and for two answers."""
        return START_SECONDS + 2 * TIMEOUT_SECONDS

    @abstractmethod
    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        """The grade of a model's text, which may hold anything; `data`: what else the task gives.
        Raises `NotGradable`, and `UserError` when the grader's library is not installed here."""

    takes_lists: ClassVar[bool] = False
    """Whether an answer may be a list; else a list in the data has several answers."""

    def check(self, answer: str, data: Mapping[str, Any]) -> None:  # noqa: B027  (most have none)
        """Raise `NotGradable` if no text is right, by the record alone and without a library."""

    def completion(self, answer: str) -> str:
        """What a model writes that gives a task's answer, with the full reward."""
        return answer


def valid(text: str) -> str:
    """A model's text with replacements for lone surrogates, which no process can be sent."""
    return text.encode("utf-8", "replace").decode("utf-8")


def zero(reason: str) -> Grade:
    """A reward of 0 for a reason that lies in the model's text; its share shows in the metrics."""
    return Grade(0.0, {reason: 1.0})


GRADERS = {
    "exact": "plain:Exact",
    "json": "plain:Json",
    "number": "plain:Number",
    "math": "math:Math",
    "code": "code:Code",
}

__all__ = ["GRADERS", "Grader", "make_grader", "zero"]


def make_grader(name: str, options: Mapping[str, Any] | None = None) -> Grader:
    """The grader `name`; raises `UserError`."""
    if name not in GRADERS:
        raise UserError(f"grader {name!r} is unknown; there are: {', '.join(sorted(GRADERS))}")
    module, _, kind = GRADERS[name].partition(":")
    made: type[Grader] = getattr(import_module(f"{__name__}.{module}"), kind)
    return made(struct_from_mapping(made.Options, dict(options or {}), f"grader {name!r}: options"))
