"""Ready-made tasks of an environment: a list, a generator, a generator that grows harder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import blake3
import msgspec

from peers.environments.interface import Prompt, Split, Task, Tasks
from swarm.rollouts.seeds import digest

SPLITS: tuple[Split, Split] = ("train", "held_out")

HELD_OUT_BELOW = 16
"""A prompt whose BLAKE3 starts with a byte below this is held out: one in sixteen."""

DRAWS_MAX = 10_000
"""Attempts to draw a task of the requested split. A training task is missed by all of them with
probability (1/16)^10000, a held-out task with (15/16)^10000, which is below 1e-280."""


def split_of(prompt: Prompt) -> Split:
    """The split a prompt belongs to, by its hash, so that training never sees a held-out prompt."""
    raw = prompt.encode("utf-8") if isinstance(prompt, str) else msgspec.json.encode(prompt)
    return "held_out" if blake3.blake3(raw).digest()[0] < HELD_OUT_BELOW else "train"


def draw(seed: bytes, split: Split, make: Callable[[bytes], Task]) -> Task:
    """The first task of `split` that `make` returns.

    Attempt 0, 1, … passes 32 bytes to `make`, derived from the seed and the attempt's number.
    Raises `ValueError` when `DRAWS_MAX` attempts give none: `make` then ignores its argument or
    has too few prompts.
    """
    for attempt in range(DRAWS_MAX):
        task = make(digest("swarm/1/draw", seed, attempt.to_bytes(4, "big")))
        if split_of(task.prompt) == split:
            return task
    raise ValueError(
        f"no {split} task in {DRAWS_MAX} draws; one prompt in sixteen is held out, by its hash: "
        "make more different prompts"
    )


@dataclass(frozen=True)
class Generated:
    """Tasks that a function makes from 32 random bytes."""

    make: Callable[[bytes], Task]

    def draw(self, seed: bytes, split: Split, step: int) -> Task:
        return draw(seed, split, self.make)


@dataclass(frozen=True)
class Curriculum:
    """Tasks that a function makes from 32 random bytes and the rollout step."""

    make: Callable[[bytes, int], Task]

    def draw(self, seed: bytes, split: Split, step: int) -> Task:
        return draw(seed, split, lambda randomness: self.make(randomness, step))


@dataclass(frozen=True)
class TaskList:
    """A finite list of tasks, each split drawn uniformly."""

    tasks: Sequence[Task]

    def draw(self, seed: bytes, split: Split, step: int) -> Task:
        if not self.tasks:
            raise ValueError("its TaskList is empty; give it tasks")
        try:
            return draw(seed, split, self._chosen)
        except ValueError as error:
            raise ValueError(
                f"its TaskList of {len(self.tasks)} tasks has no {split} task that could be found; "
                "one prompt in sixteen is held out, by its hash: add tasks"
            ) from error

    def _chosen(self, randomness: bytes) -> Task:
        # 256 bits modulo the length favour no task measurably.
        return self.tasks[int.from_bytes(randomness, "big") % len(self.tasks)]


SHARE_DRAWS = 1024
"""Prompts whose split is looked at to estimate the share that is held out."""


def held_out_share(tasks: Tasks) -> float | None:
    """About the share of the prompts that is held out; None for tasks of another kind."""
    drawn: Iterable[Task]
    if isinstance(tasks, TaskList):
        drawn = itertools.islice(tasks.tasks, SHARE_DRAWS)
    elif isinstance(tasks, Generated):
        drawn = map(tasks.make, _randoms())
    elif isinstance(tasks, Curriculum):
        drawn = (tasks.make(randomness, 0) for randomness in _randoms())
    else:
        return None
    splits = [split_of(task.prompt) for task in drawn]
    return splits.count("held_out") / len(splits) if splits else None


def _randoms() -> Iterator[bytes]:
    for number in range(SHARE_DRAWS):
        yield digest("swarm/1/share", number.to_bytes(4, "big"))
