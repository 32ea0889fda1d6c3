"""Judges: graded rewards from a model, as options of any environment.

The run's manifest names a judge and pins it by a hash. What the judge is (its model, its prompt)
and where it is reached stands in a file on the machines that grade, so a worker needs none of it
and learns none of it. The modules that speak HTTP are imported when the first reward is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peers.environments.interface import Environment, Grade, NotGradable, Task, Transcript, Wrapper
from swarm.errors import UserError
from swarm.wire.manifest import OptionValue

if TYPE_CHECKING:
    from peers.environments.judges.judge import Judge

CALL_SECONDS = 330.0
"""Longest call of a judge, its retries included."""

JUDGE_NAME = r"^[a-z][a-z0-9-]{0,39}\Z"


class JudgeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that let a judge grade any environment's answers."""

    judge: Annotated[str, Meta(pattern=JUDGE_NAME)]
    """The judge's name: the machines that grade have a file NAME.toml."""
    judge_hash: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """Hash of what that file defines; `swarm run create` fills it in on a machine that has the
    file. Empty: any."""
    judge_weight: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """The reward is judge_weight times the judge's and the rest times the environment's own."""


class JudgedEnvironment(Wrapper):
    """An environment whose answers a judge grades."""

    def __init__(self, inner: Environment, options: JudgeOptions) -> None:
        super().__init__(inner)
        self.options: JudgeOptions = options
        self.call_seconds = inner.call_seconds + CALL_SECONDS

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """The judge's reward, mixed with the environment's own; raises `NotGradable`."""
        weight = self.options.judge_weight
        own = None if weight == 1 else _graded(self.inner.grade(task, transcript))
        try:
            score = self._judge.score(task, transcript)
        except NotGradable:
            raise
        except UserError as error:  # the judge's file is this machine's, not the worker's
            raise NotGradable(str(error)) from error
        if own is None:
            return Grade(score, {"judge": score})
        reward = weight * score + (1 - weight) * own.reward
        return Grade(reward, {**own.parts, "own": own.reward, "judge": score})

    def pins(self) -> Mapping[str, OptionValue]:
        """The hash of the judge, if this machine knows it."""
        from peers.environments.judges.definition import read_definition

        pinned = self.inner.pins()
        if not self.options.judge_hash:
            with suppress(UserError):
                definition, *_ = read_definition(self.options.judge)
                return {**pinned, "judge_hash": definition.digest().hex()}
        return pinned

    @cached_property
    def _judge(self) -> Judge:
        from peers.environments.judges.judge import Judge

        return Judge.open(self.options.judge, self.options.judge_hash)


def _graded(given: float | Grade) -> Grade:
    return given if isinstance(given, Grade) else Grade(given)
