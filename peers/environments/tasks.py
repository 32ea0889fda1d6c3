"""Ready-made tasks of an environment: a list, rows, a generator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import blake3
import msgspec

from peers.environments.interface import Prompt, Split, Task, Tasks, UnusableTask
from swarm.rollouts.seeds import digest

SPLITS: tuple[Split, Split] = ("train", "held_out")

HELD_OUT_BELOW = 16
"""A prompt whose BLAKE3 starts with a byte below this is held out: one in sixteen."""

DRAWS_MAX = 10_000
"""Attempts to draw a task of the requested split. A training task is missed by all of them with
probability (1/16)^10000, a held-out task with (15/16)^10000, which is below 1e-280."""


def split_of(prompt: Prompt) -> Split:
    """The split of a prompt, by its hash alone; raises `UnusableTask` for text without UTF-8."""
    try:
        raw = prompt.encode("utf-8") if isinstance(prompt, str) else msgspec.json.encode(prompt)
    except UnicodeEncodeError as error:  # half of a UTF-16 pair
        raise UnusableTask(f"the prompt {prompt!r:.60} is no text in Unicode ({error})") from error
    return "held_out" if blake3.blake3(raw).digest()[0] < HELD_OUT_BELOW else "train"


def draw(
    seed: bytes,
    split: Split,
    make: Callable[[bytes], Task],
    split_of_task: Callable[[Task], Split] = lambda task: split_of(task.prompt),
) -> Task:
    """The first task of `split` that `make` returns; it may raise `UnusableTask` for some.

    Attempt 0, 1, … passes 32 bytes to `make`, derived from the seed and the attempt's number.
    Raises `UnusableTask` when `DRAWS_MAX` attempts give no other, else `ValueError` when they give
    none of the split: `make` then ignores its argument or has too few prompts."""
    unusable: UnusableTask | None = None
    others = 0
    for attempt in range(DRAWS_MAX):
        try:
            task = make(digest("swarm/1/draw", seed, attempt.to_bytes(4, "big")))
            if split_of_task(task) == split:
                return task
            others += 1
        except UnusableTask as error:
            unusable = error
    if unusable is not None and not others:
        raise unusable
    raise ValueError(
        f"no {split} task in {DRAWS_MAX} draws; one prompt in sixteen is held out, by its hash: "
        "make more different prompts"
    )


@dataclass(frozen=True)
class Generated:
    """Tasks that a function makes from 32 random bytes."""

    make: Callable[[bytes], Task]

    def draw(self, seed: bytes, split: Split) -> Task:
        return draw(seed, split, self.make)


@dataclass(frozen=True)
class Indexed:
    """Tasks by an index below `count`, drawn uniformly; if `at` raises `UnusableTask`, again."""

    count: int
    at: Callable[[int], Task]
    named: Callable[[int], str] = "task {}".format
    """What a message calls a task; an `UnusableTask` that `at` raises says it already."""

    def draw(self, seed: bytes, split: Split) -> Task:
        # 256 bits modulo the number of tasks favour none measurably.
        return draw(seed, split, lambda raw: self.at(int.from_bytes(raw, "big") % self.count))


ALIKE = 4
"""The tasks of a game may differ in nothing that the model sees. If these first ones have one
prompt, it is taken for such a game."""


@dataclass(frozen=True)
class Numbered:
    """Tasks whose data have their `index`, uniform within each split."""

    count: int
    make: Callable[[int], Task]
    by_index: bool
    """Whether the split is that of the index, because all prompts are alike."""

    @classmethod
    def of(cls, count: int, make: Callable[[int], Task]) -> Self:
        """Make the first tasks, to see whether they are alike."""
        alike = len({make(index).prompt for index in range(min(count, ALIKE))}) == 1
        return cls(count, make, by_index=count > 1 and alike)

    def draw(self, seed: bytes, split: Split) -> Task:
        return draw(
            seed, split, lambda raw: self.make(int.from_bytes(raw, "big") % self.count), self._split
        )

    def _split(self, task: Task) -> Split:
        return split_of(str(task.data["index"]) if self.by_index else task.prompt)


@dataclass(frozen=True)
class Changed:
    """Other tasks, each changed by a function of the task and the seed that drew it."""

    inner: Tasks
    change: Callable[[Task, bytes], Task]

    def draw(self, seed: bytes, split: Split) -> Task:
        return self.change(self.inner.draw(seed, split), seed)


@dataclass(frozen=True)
class TaskList:
    """A finite list of tasks, each split drawn uniformly."""

    tasks: Sequence[Task]

    def draw(self, seed: bytes, split: Split) -> Task:
        if not self.tasks:
            raise ValueError("its TaskList is empty; give it tasks")
        try:
            return Indexed(len(self.tasks), self.tasks.__getitem__).draw(seed, split)
        except ValueError as error:
            raise ValueError(
                f"its TaskList of {len(self.tasks)} tasks has no {split} task that could be found; "
                "one prompt in sixteen is held out, by its hash: add tasks"
            ) from error


def indexed(tasks: Tasks) -> Indexed | None:
    """The same tasks by index, if there are finitely many."""
    if isinstance(tasks, Changed):
        if (inner := indexed(tasks.inner)) is None:
            return None
        change, at = tasks.change, inner.at
        return Indexed(
            inner.count,
            lambda index: change(at(index), digest("swarm/1/index", index.to_bytes(8, "big"))),
            inner.named,
        )
    if isinstance(tasks, TaskList):
        return Indexed(len(tasks.tasks), tasks.tasks.__getitem__)
    return tasks if isinstance(tasks, Indexed) else None
