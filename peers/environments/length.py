"""Length rewards: an environment whose prompts ask for a number of tokens, and hold to it.

The reward is r_task − alpha · |target − length| (INTELLECT-2, arXiv 2505.07291, §3.1.2), where the
length counts every completion token, its stop token included, as the validator counts them. The
target is one of a few, drawn from the task's seed: the same for a whole group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import parse_qsl

from peers.environments.base import Environment, Split, Task, task_of_step
from swarm.errors import UserError
from swarm.rollouts.seeds import digest

ALPHA = 0.0003
"""Reward lost per token off the target (INTELLECT-2)."""

PROMPT = "{prompt} Think for {length} tokens before giving a response."
"""INTELLECT-2's wording."""

TARGETS_MAX = 64
LENGTH_MAX = 1 << 20


class LengthTargets:
    """Another environment with length targets. Its name says all: it is what peers agree on."""

    def __init__(
        self,
        inner: Environment,
        name: str,
        targets: Sequence[int],
        alpha: float = ALPHA,
        prompt: str = PROMPT,
    ) -> None:
        self.name = name
        self.version = inner.version
        self.inner = inner
        self._targets = tuple(targets)
        self._alpha = alpha
        self._prompt = prompt

    def task(self, seed: bytes, split: Split = "train") -> Task:
        """The inner task of that seed, its prompt asking for a length."""
        return self._with_target(self.inner.task(seed, split), seed)

    def task_at(self, seed: bytes, step: int, split: Split = "train") -> Task:
        """Likewise of a curriculum's task."""
        return self._with_target(task_of_step(self.inner, seed, step, split), seed)

    def reward(self, task: Task, completion_text: str, finished: bool) -> float:
        """The inner grade; `Task.length_penalty` is what comes off it."""
        return self.inner.reward(task, completion_text, finished)

    def _with_target(self, task: Task, seed: bytes) -> Task:
        chosen = int.from_bytes(digest("swarm/1/target-length", seed), "big")
        target = self._targets[chosen % len(self._targets)]
        prompt = self._prompt.replace("{length}", str(target)).replace("{prompt}", task.prompt)
        return replace(task, prompt=prompt, target_length=target, length_weight=self._alpha)


def with_options(inner: Environment, name: str, options: str) -> Environment:
    """The environment `inner?options`: `lengths=2000,4000&alpha=0.0003&prompt=…`, as in a URL.

    `alpha` and `prompt` (with `{prompt}` and `{length}`) have INTELLECT-2's values unless given.
    Raises `UserError`.
    """
    given = dict(parse_qsl(options, keep_blank_values=True))
    unknown = sorted(set(given) - {"lengths", "alpha", "prompt"})
    if unknown or "lengths" not in given:
        raise UserError(
            f"environment {name!r} has the options {', '.join(given) or 'none'}; there are: "
            "lengths (needed), alpha, prompt"
        )
    try:
        targets = [int(length) for length in given["lengths"].split(",")]
        alpha = float(given.get("alpha", ALPHA))
    except ValueError as error:
        raise UserError(
            f"environment {name!r} has an option that is no number ({error})"
        ) from error
    prompt = given.get("prompt", PROMPT)
    in_bounds = all(1 <= target <= LENGTH_MAX for target in targets)
    if (
        not in_bounds
        or len(targets) > TARGETS_MAX
        or not 0 <= alpha <= 1
        or ("{length}" not in prompt or "{prompt}" not in prompt)
    ):
        raise UserError(
            f"environment {name!r}: lengths are up to {TARGETS_MAX} whole numbers from 1 to "
            f"{LENGTH_MAX}, alpha lies in [0, 1], prompt holds {{prompt}} and {{length}}"
        )
    return LengthTargets(inner, name, targets, alpha, prompt)
