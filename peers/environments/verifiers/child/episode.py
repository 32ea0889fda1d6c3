"""An episode in progress: the environment runs as a task and asks for the model's texts."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from peers.environments.graders.worker import Refusal


class Unplayable(Refusal):
    """The environment cannot be played by texts; says why, and what to do."""


class Said(NamedTuple):
    """A message of a conversation."""

    role: str
    content: str
    calls: str = ""
    """JSON list of its calls of tools, as `ToolMessage.tool_calls`."""
    call_id: str = ""
    """The call whose result it is."""
    name: str = ""
    """The tool whose result it is."""


class Called(NamedTuple):
    """A call of a tool, by the model."""

    id: str
    name: str
    arguments: str
    """A JSON object."""

    def wire(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def calls_json(calls: Iterable[Any]) -> str:
    """A message's calls as JSON, empty for none; raises `Unplayable` for arguments but objects."""
    made = []
    for call in calls:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise Unplayable(f"a call of {call.name!r} has arguments that are no JSON object")
        function = {"name": call.name, "arguments": arguments}
        made.append({"id": call.id, "type": "function", "function": function})
    return json.dumps(made, ensure_ascii=False) if made else ""


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
    called: tuple[tuple[str, str], ...] = ()
    """Calls of tools after the text: name, and arguments as a JSON object."""

    def calls(self, turn: int) -> list[Called]:
        """The calls with ids of their own, nine letters and digits as Mistral's templates want."""
        return [
            Called(f"call{turn % 1000:03}{number % 100:02}", *each)
            for number, each in enumerate(self.called)
        ]


class Tasks(Protocol):
    """An environment, loaded."""

    count: int

    async def play(self, task: int, episode: "Episode") -> Graded | Ungradable:
        """Run a task's episode to its end, asking `episode` for the texts, and grade it."""

    def answer(self, task: int) -> str:
        """The expected answer of a task, if it has one."""


class Episode:
    """Connects an environment that runs by itself with an owner that gives one text at a time."""

    def __init__(self, play: "Callable[[Episode], Awaitable[Graded | Ungradable]]") -> None:
        """Start the environment; needs a running event loop."""
        self._conversations: dict[str, list[Said]] = {}
        """What was said in each run of an agent."""
        self._turns = 0
        self._asked: asyncio.Queue[list[Said]] = asyncio.Queue()
        self._spoken: asyncio.Queue[Spoken | None] = asyncio.Queue()
        self._grade = asyncio.ensure_future(play(self))
        self.cut = False
        """Whether the owner ended the episode while the environment wanted to go on."""
        self.tools = ""
        """JSON list of the tools' definitions."""

    async def ask(
        self,
        conversation: Sequence[Said],
        tools: Sequence[Any] = (),
        run: str = "",
        agent: str = "",
    ) -> tuple[Spoken, list[Called]]:
        """The model's next text and its calls; raises `EpisodeOver` when none follows.

        `run` and `agent` name who asks: the model plays every agent, one turn after another, and is
        told for which. Raises `Unplayable` when `conversation` does not begin with what was said in
        this run before: the model has those tokens, and they cannot be taken back."""
        before = self._conversations.setdefault(run, [])
        known = len(before)
        if self.cut:
            raise EpisodeOver
        if list(conversation[:known]) != before:
            raise Unplayable("it rewrites what was said before, which tokens do not allow")
        new = list(conversation[known:])
        if not new:
            raise Unplayable("it asks for two texts in a row")
        offered = json.dumps(list(tools), ensure_ascii=False) if tools else ""
        if self._turns and offered != self.tools:
            raise Unplayable("it changes its tools in the middle of an episode")
        self.tools = offered
        if len(self._conversations) > 1 and all(each.role in ("system", "user") for each in new):
            told = "\n\n".join(each.content for each in new)
            new = [Said("user", f"[{agent}]\n{told}")]
        self._asked.put_nowait(new)
        if (spoken := await self._spoken.get()) is None:
            self.cut = True
            raise EpisodeOver
        calls = spoken.calls(self._turns)
        self._turns += 1
        said = Said("assistant", spoken.text, calls_json(calls))
        self._conversations[run] = [*conversation, said]
        return spoken, calls

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
        return await self._grade

    async def close(self) -> None:
        self._grade.cancel()
        await asyncio.wait({self._grade})
        if not self._grade.cancelled():
            self._grade.exception()  # its owner has seen it, or no longer cares
