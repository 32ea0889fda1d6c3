"""Length rewards: prompts that ask for a number of tokens, and a penalty for missing it.

The reward is r_task − alpha · |target − length| (INTELLECT-2, arXiv 2505.07291, §3.1.2). The
length counts every completion token, the stop token included, as the validator counts them. The
target is drawn from a short list with the task's seed, so it is the same for a whole group."""

from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta

from peers.environments.interface import Environment, Task, Tasks, Wrapper, messages_of, with_text
from peers.environments.tasks import Changed
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


class LengthTargets(Wrapper):
    """Adds length targets to an environment's prompts; others subtract `Task.length_penalty`."""

    def __init__(self, inner: Environment, options: LengthOptions) -> None:
        super().__init__(inner)
        self.options: LengthOptions = options

    def tasks(self) -> Tasks:
        return Changed(self.inner.cached_tasks, self._with_target)

    def _with_target(self, task: Task, seed: bytes) -> Task:
        chosen = int.from_bytes(digest("swarm/1/target-length", seed), "big")
        target = self.options.lengths[chosen % len(self.options.lengths)]
        template = self.options.prompt.replace("{length}", str(target))
        asked = messages_of(task.prompt)[-1].content
        prompt = with_text(task.prompt, template.replace("{prompt}", asked))
        alpha = self.options.alpha
        return replace(task, prompt=prompt, target_length=target, length_weight=alpha, inner=task)
