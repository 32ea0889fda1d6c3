"""The interface of a grader: it compares a completion's text with the answer of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from peers.environments.interface import Grade, Task, Transcript

START_SECONDS = 60.0
"""Wall time to start a process and import a library, on a machine that may be busy."""


class Grader(ABC):
    """Grades texts against answers; the same on every machine.

    If a text is at fault, a part of its grade names the reason (`zero`). A grader that cannot
    decide raises `NotGradable`: docs/environments.md says which is which.
    """

    name: ClassVar[str]
    Options: ClassVar[type[msgspec.Struct]]
    options: Any
    timeout_seconds: float = 30.0
    """Wall time for one answer, after which it is not gradable."""
    max_parallel: int = 2
    """Answers that are graded at a time in one process of Swarm."""

    def __init__(self, options: Any = None) -> None:
        self.options = self.Options() if options is None else options

    @property
    def call_seconds(self) -> float:
        """Wall time that a call of `grade` may take: to start a process, and for two answers."""
        return START_SECONDS + 2 * self.timeout_seconds

    @abstractmethod
    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        """The grade of a model's text, which may hold anything, for a task's answer.

        `data` holds what else the task gives. Raises `NotGradable`, and `UserError` when the
        grader's library is not installed here.
        """

    def grade_episode(self, task: Task, transcript: Transcript) -> Grade:
        """The grade of an episode's last text; one cut at the length limit earns nothing.

        Raises as `grade`.
        """
        if not transcript.finished:
            return zero("unfinished")
        return self.grade(transcript.text, task.answer, task.data)

    def completion(self, answer: str) -> str:
        """What a model writes that gives a task's answer, with the full reward."""
        return answer


def valid(text: str) -> str:
    """A model's text with replacements for lone surrogates, which no process can be sent."""
    return text.encode("utf-8", "replace").decode("utf-8")


def zero(reason: str) -> Grade:
    """A reward of 0 for a reason that lies in the model's text; its share shows in the metrics."""
    return Grade(0.0, {reason: 1.0})
