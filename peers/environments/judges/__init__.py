"""Judges: graded rewards from a model, as options of any environment.

The run's manifest names a judge and pins it by a hash. What the judge is (its model, its prompt)
and where it is reached stands in a file on the machines that grade, so a worker needs none of it
and learns none of it. The modules that load models or speak HTTP are imported when the first reward
is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from peers.environments.interface import (
    Environment,
    Grade,
    NotGradable,
    Task,
    Tasks,
    Transcript,
    Wrapper,
)
from peers.environments.tasks import Changed
from swarm.errors import UserError
from swarm.rollouts.seeds import digest

if TYPE_CHECKING:
    from peers.environments.judges.judge import Judge

CALL_SECONDS = 330.0
"""Longest call of a judge, its retries included, with time to start a model's process."""

DATA = "judge"
"""Key in `Task.data` of what `JudgedEnvironment` notes for its grades."""

JUDGE_NAME = r"^[a-z][a-z0-9-]{0,39}\Z"


class JudgeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that let a judge grade any environment's answers."""

    judge: Annotated[str, Meta(pattern=JUDGE_NAME)]
    """The judge's name: the machines that grade have a file NAME.toml."""
    judge_hash: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """Hash of what that file defines (`swarm judge NAME` prints it); empty: any."""
    judge_weight: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """The reward is judge_weight times the judge's and the rest times the environment's own."""
    judge_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the groups that are judged, drawn by their seeds."""
    judge_others: Literal["own", "none"] = "own"
    """The other groups: own: the environment's own reward. none: not gradable, so that their
    submission is credited and not trained on."""
    judge_calls_per_step: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Most calls of the judge for a rollout step, on each machine that grades; 0: no bound."""
    judge_tokens_per_step: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Most tokens of the judge for a rollout step, likewise."""


class JudgedEnvironment(Wrapper):
    """An environment whose answers a judge grades."""

    def __init__(self, inner: Environment, options: JudgeOptions) -> None:
        super().__init__(inner)
        self.options: JudgeOptions = options
        self.call_seconds = inner.call_seconds + CALL_SECONDS

    def tasks(self) -> Tasks:
        return Changed(self.inner.cached_tasks, self._noted)

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """The judge's reward, mixed with the environment's own; raises `NotGradable`."""
        options, noted = self.options, task.data.get(DATA) or {}
        if not noted.get("judged", True):
            if options.judge_others == "own":
                return self.inner.grade(task, transcript)
            raise NotGradable(
                f"its group is not among the {options.judge_share:.0%} that are judged "
                "(judge_share), and judge_others is none"
            )
        own = None if options.judge_weight == 1 else _graded(self.inner.grade(task, transcript))
        try:
            score = self._judge.score(task, transcript, int(noted.get("step", 0)))
        except NotGradable:
            raise
        except UserError as error:  # the judge's file is this machine's, not the worker's
            raise NotGradable(str(error)) from error
        if own is None:
            return Grade(score, {"judge": score})
        reward = options.judge_weight * score + (1 - options.judge_weight) * own.reward
        return Grade(reward, {**own.parts, "own": own.reward, "judge": score})

    def _noted(self, task: Task, seed: bytes, step: int) -> Task:
        """A task with a note for its grade: a group is judged as a whole or not at all."""
        drawn = int.from_bytes(digest("swarm/1/judge-share", seed)[:6], "big") / 2**48
        note: dict[str, Any] = {"step": step, "judged": drawn < self.options.judge_share}
        return replace(task, data={**task.data, DATA: note})

    @cached_property
    def _judge(self) -> Judge:
        from peers.environments.judges.judge import Judge, JudgeLimits

        options = self.options
        limits = JudgeLimits(options.judge_calls_per_step, options.judge_tokens_per_step)
        return Judge.open(options.judge, options.judge_hash, limits)


def _graded(given: float | Grade) -> Grade:
    return given if isinstance(given, Grade) else Grade(given)
