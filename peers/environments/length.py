"""Length rewards: prompts that ask for a number of tokens, and a penalty for missing it.

The reward is r_task − alpha · |target − length| (INTELLECT-2, arXiv 2505.07291, §3.1.2). The
length counts every completion token, the stop token included, as the validator counts them. The
target is drawn from a short list with the task's seed, so it is the same for a whole group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta

from peers.environments.base import Environment, Split, Task, task_of_step
from swarm.rollouts.seeds import digest

ALPHA = 0.0003
"""Reward lost per token of distance from the target (INTELLECT-2)."""

PROMPT = "{prompt} Think for {length} tokens before giving a response."
"""INTELLECT-2's wording."""

TARGETS_MAX = 64
LENGTH_MAX = 1 << 20


HOLDS_BOTH = r"(?s)\{length\}.*\{prompt\}|\{prompt\}.*\{length\}"


class LengthOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that give any environment length targets."""

    lengths: Annotated[
        list[Annotated[int, Meta(ge=1, le=LENGTH_MAX)]], Meta(min_length=1, max_length=TARGETS_MAX)
    ]
    """Possible targets in completion tokens; the task's seed draws one of them."""
    alpha: Annotated[float, Meta(ge=0, le=1)] = ALPHA
    prompt: Annotated[str, Meta(pattern=HOLDS_BOTH)] = PROMPT
    """Template of the prompt, with `{length}` and the inner environment's `{prompt}`."""


class LengthTargets:
    """An environment that adds length targets to an inner environment."""

    def __init__(self, inner: Environment, options: LengthOptions) -> None:
        self.name = inner.name
        self.version = inner.version
        self.inner = inner
        self._options = options

    def task(self, seed: bytes, split: Split = "train") -> Task:
        """Draw the inner environment's task and add a length target to its prompt."""
        return self._with_target(self.inner.task(seed, split), seed)

    def task_at(self, seed: bytes, step: int, split: Split = "train") -> Task:
        """Draw the inner curriculum's task and add a length target to its prompt."""
        return self._with_target(task_of_step(self.inner, seed, step, split), seed)

    def reward(self, task: Task, completion_text: str, finished: bool) -> float:
        """The inner environment's grade; `Task.length_penalty` is subtracted elsewhere."""
        return self.inner.reward(task.inner or task, completion_text, finished)

    def _with_target(self, task: Task, seed: bytes) -> Task:
        chosen = int.from_bytes(digest("swarm/1/target-length", seed), "big")
        target = self._options.lengths[chosen % len(self._options.lengths)]
        prompt = self._options.prompt.replace("{length}", str(target))
        prompt = prompt.replace("{prompt}", task.prompt)
        return replace(
            task, prompt=prompt, target_length=target, length_weight=self._options.alpha, inner=task
        )
