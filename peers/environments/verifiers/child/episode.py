"""An episode in progress: the environment runs as a task and asks for the model's texts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from peers.environments.graders.worker import Refusal


class Unplayable(Refusal):
    """The environment cannot be played by texts; says why, and what to do."""


class Said(NamedTuple):
    """A message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Graded:
    """A whole episode's reward."""

    reward: float
    parts: dict[str, float]
    """Rewards and metrics by name, before their weights."""


@dataclass(frozen=True)
class Ungradable:
    """Why the reward cannot be known here."""

    reason: str


class EpisodeOver(Exception):
    """Raised to an environment that asks for a text after the episode's last one."""


@dataclass(frozen=True)
class Spoken:
    """A text of the model."""

    text: str
    finished: bool
    """Whether it ended by itself rather than at the length limit."""


class Tasks(Protocol):
    """An environment, loaded."""

    count: int

    async def play(self, task: int, episode: Episode) -> Graded | Ungradable:
        """Run a task's episode to its end, asking `episode` for the texts, and grade it."""
        ...

    def answer(self, task: int) -> str:
        """The expected answer of a task, if it has one."""
        ...


class Episode:
    """Connects an environment that runs by itself with an owner that gives one text at a time."""

    def __init__(self, play: Callable[[Episode], Awaitable[Graded | Ungradable]]) -> None:
        """Start the environment; needs a running event loop."""
        self._conversation: list[Said] = []
        self._asked: asyncio.Queue[list[Said]] = asyncio.Queue()
        self._spoken: asyncio.Queue[Spoken | None] = asyncio.Queue()
        self._grade = asyncio.ensure_future(play(self))
        self.cut = False
        """Whether the owner ended the episode while the environment wanted to go on."""

    async def ask(self, conversation: Sequence[Said]) -> Spoken:
        """The model's next text, for the environment; raises `EpisodeOver` when none follows.

        Raises `Unplayable` when `conversation` does not begin with what was said before: the model
        has those tokens in its context, and they cannot be taken back."""
        known = len(self._conversation)
        if self.cut or list(conversation[:known]) != self._conversation:
            if self.cut:
                raise EpisodeOver
            raise Unplayable("it rewrites what was said before, which tokens do not allow")
        new = list(conversation[known:])
        if not new:
            raise Unplayable("it asks for two texts in a row")
        self._asked.put_nowait(new)
        spoken = await self._spoken.get()
        if spoken is None:
            self.cut = True
            raise EpisodeOver
        self._conversation = [*conversation, Said("assistant", spoken.text)]
        return spoken

    def say(self, spoken: Spoken | None) -> None:
        """Give the environment the text that it asked for; None: the episode ends here."""
        self._spoken.put_nowait(spoken)

    async def asked(self) -> list[Said]:
        """What the environment says before the model's next text; empty when it has ended."""
        asked = asyncio.ensure_future(self._asked.get())
        await asyncio.wait({asked, self._grade}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        self._grade.result()  # raises what the environment raised
        return []

    async def graded(self) -> Graded | Ungradable:
        """Wait for the environment's end and its grade."""
        return await self._grade

    async def close(self) -> None:
        """End the environment, wherever it is."""
        self._grade.cancel()
        await asyncio.wait({self._grade})
        if not self._grade.cancelled():
            self._grade.exception()  # its owner has seen it, or no longer cares
