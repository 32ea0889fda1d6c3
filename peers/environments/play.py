"""Calls of an environment's code, which is a lab's and may fail in any way.

Every failure, and a call that does not return, becomes a `UserError` that names the environment.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

from peers.environments.deadline import limited
from peers.environments.interface import (
    Conversation,
    Environment,
    Grade,
    Message,
    NotGradable,
    Split,
    Task,
    Transcript,
    episodes_of,
)
from swarm.errors import UserError

Observation = str | tuple[Message, ...]


def task_of(
    environment: Environment, seed: bytes, split: Split = "train", *, step: int = 0
) -> Task:
    """Draw the task of a seed in a rollout step; raises `UserError`."""
    try:
        with _limited(environment, "draw a task"):
            task = environment.cached_tasks.draw(seed, split, step)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"environment {environment.name!r} cannot draw a task ({described(error)}); repair it"
        ) from error
    if not isinstance(task, Task) or not _is_prompt(_messages(task.prompt)):
        raise UserError(
            f"environment {environment.name!r} draws {task!r:.100}; it must be a Task with a "
            "prompt of text or messages"
        )
    return task


class Episode:
    """The environment's side of one episode."""

    def __init__(self, environment: Environment, task: Task) -> None:
        self._environment, self._task = environment, task.own
        self._answering = episodes_of(environment)
        self._state: Any = None
        self._is_started = False

    def step(self, text: str) -> Observation | None:
        """The observation after the model's next turn, or None at the end; raises `UserError`."""
        if self._answering is None:
            return None
        try:
            with _limited(self._environment, f"answer the turn {text[:40]!r}"):
                if not self._is_started:
                    self._state, self._is_started = self._answering.start(self._task), True
                observation = self._answering.step(self._state, text)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(
                f"environment {self._environment.name!r} cannot answer the turn {text[:40]!r} "
                f"({described(error)}); repair it"
            ) from error
        if observation is not None and not _is_prompt(observation):
            raise UserError(
                f"environment {self._environment.name!r} answers the turn {text[:40]!r} with "
                f"{observation!r:.100}; it must be text, messages, or None to end the episode"
            )
        return observation


def grade(environment: Environment, task: Task, transcript: Transcript) -> Grade:
    """The environment's grade of an episode.

    Raises `NotGradable` as the environment does, and `UserError` when its code fails or the reward
    is not in [0, 1].
    """
    text = repr(transcript.text[:40])
    try:
        with _limited(environment, f"grade the completion {text}"):
            given = environment.grade(task.own, transcript)
    except NotGradable as error:
        raise NotGradable(
            f"environment {environment.name!r} cannot know the reward of the completion {text}: "
            f"{error}"
        ) from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"environment {environment.name!r} cannot grade the completion {text} "
            f"({described(error)}); a reward must never raise, but be 0 for what it does not "
            "understand"
        ) from error
    graded = given if isinstance(given, Grade) else Grade(given)
    if not _is_number(graded.reward) or not 0 <= graded.reward <= 1:
        raise UserError(
            f"environment {environment.name!r} gives the completion {text} the reward "
            f"{graded.reward!r:.40}; it must be a number in [0, 1]"
        )
    for name, part in graded.parts.items():
        if not isinstance(name, str) or not _is_number(part) or not math.isfinite(part):
            raise UserError(
                f"environment {environment.name!r} gives the completion {text} the part {name!r} "
                f"= {part!r:.40}; it must be a name with a finite number"
            )
    return Grade(float(graded.reward), {name: float(part) for name, part in graded.parts.items()})


def _limited(environment: Environment, what: str) -> AbstractContextManager[None]:
    return limited(
        environment.call_seconds,
        lambda: (
            f"environment {environment.name!r} took more than {environment.call_seconds:g} s to "
            f"{what}; make it faster, or raise its call_seconds"
        ),
    )


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


def _messages(prompt: object) -> object:
    return prompt.messages if isinstance(prompt, Conversation) else prompt


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):
        return True
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(
            isinstance(each, Message)
            and isinstance(each.role, str)
            and isinstance(each.content, str)
            for each in value
        )
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
