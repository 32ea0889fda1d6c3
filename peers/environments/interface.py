"""The interface of an environment: tasks from seeds, grades of transcripts, and episodes.

A subclass of `SingleTurn` or `Episodes` is an environment. Its tasks, observations and grades must
be deterministic: a validator draws every task again, replays every episode and grades it again."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

from swarm.errors import UserError
from swarm.wire.manifest import OptionValue

if TYPE_CHECKING:
    from peers.environments.chat_template import ChatTemplate

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Message:
    """One message of a chat, which the checkpoint's chat template renders."""

    role: str
    content: str

    def fields(self) -> dict[str, Any]:
        """The message as a template gets it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class ToolMessage(Message):
    """A message with calls of tools, or with the result of one."""

    tool_calls: str = ""
    """JSON list of the calls, each with the arguments as an object; of the role `assistant`."""
    tool_call_id: str = ""
    """The call whose result this is; of the role `tool`."""
    name: str = ""

    def fields(self) -> dict[str, Any]:
        calls = json.loads(self.tool_calls) if self.tool_calls else None
        extra = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        return super().fields() | {key: value for key, value in extra.items() if value}


@dataclass(frozen=True)
class Conversation:
    """A chat with the variables that its template gets; chat options make it of other prompts."""

    messages: tuple[Message, ...]
    variables: tuple[tuple[str, bool | int | float | str], ...] = ()
    """The value of `tools` is a JSON list."""


Prompt = str | tuple[Message, ...] | Conversation
"""Text that the model continues, or a chat that it answers."""


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """The messages of a prompt; text is a message of the user."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    return prompt.messages if isinstance(prompt, Conversation) else prompt


def with_text(prompt: Prompt, text: str) -> Prompt:
    """A prompt with another text, or with another text of its last message."""
    if isinstance(prompt, str):
        return text
    *before, last = messages_of(prompt)
    messages = (*before, replace(last, content=text))
    return replace(prompt, messages=messages) if isinstance(prompt, Conversation) else messages


def as_text(prompt: Prompt) -> str:
    """A prompt for people to read."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.role}: {message.content}" for message in messages_of(prompt))


@dataclass(frozen=True)
class Task:
    """One problem to solve."""

    prompt: Prompt
    answer: str
    """A completion with full reward, for `swarm sft` and checks; empty if none is known."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What else the grader needs, such as hidden tests; JSON values only."""
    demonstration: tuple[str, ...] = ()
    """The model's turns of an episode with full reward; empty if `answer` is its only turn."""
    target_length: int = 0
    """Completion tokens that the prompt asks for; 0: it asks for no length."""
    length_weight: float = 0.0
    """Reward lost per token of distance from the target."""
    place: str = field(default="", compare=False)
    """Where the task is from, for messages: a file and the number of its row."""
    inner: Task | None = None
    """The task before a shared option, such as length targets, changed its prompt."""

    def __post_init__(self) -> None:
        """Raise `UserError` for a prompt of one message that is not in a tuple."""
        given: object = self.prompt
        if isinstance(given, Message):
            raise UserError(
                f"a task's prompt is the single {given!r:.100}; a chat is a tuple of messages, so "
                "write (message,)"
            )

    @property
    def model_turns(self) -> tuple[str, ...]:
        """What a model writes, turn by turn, in an episode with full reward; see `answer`."""
        return self.demonstration or (self.answer,)

    @property
    def own(self) -> Task:
        """The task as the environment drew it."""
        return self if self.inner is None else self.inner.own

    def length_penalty(self, tokens: int) -> float:
        """The reward that a completion of `tokens` tokens, stop token included, loses."""
        return self.length_weight * abs(self.target_length - tokens)


@dataclass(frozen=True)
class Turn:
    """What the model or the environment wrote in its turn."""

    kind: Literal["model", "environment"]
    text: str
    """A model's text lacks its stop token. It comes from an untrusted peer."""


@dataclass(frozen=True)
class Transcript:
    """An episode after its prompt: turns of model and environment, the last of them the model's."""

    turns: tuple[Turn, ...]
    finished: bool
    """Whether the last turn ended with a stop token rather than at the token limit."""

    @property
    def text(self) -> str:
        """The model's last text."""
        return self.turns[-1].text

    @classmethod
    def of(cls, *texts: str, finished: bool = True) -> Transcript:
        """A transcript of these texts, of the model and the environment in turn."""
        turns = [
            Turn("environment" if index % 2 else "model", text) for index, text in enumerate(texts)
        ]
        return cls(tuple(turns), finished)


@dataclass(frozen=True)
class Grade:
    """A reward in [0, 1], and the parts that it is made of, for display."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


class NotGradable(UserError):
    """The reward cannot be known here, whatever the model's text: the validator quarantines the
    group with this sentence, its worker is credited, and nobody trains on it."""


class UnusableTask(UserError):
    """No rollout can be made of a task, such as a row without a prompt; the message names it.

    Every machine finds the same, by task and model alone; the seed then draws another task."""


class ScaledOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an environment whose rewards are those of somebody else's program."""

    reward_low: float = 0.0
    """Its reward that counts as 0."""
    reward_high: float = 1.0
    """Its reward that counts as 1."""

    def check(self, where: str) -> None:
        """Raise `UserError`, which begins with `where`, for rewards that are no range."""
        if self.reward_high <= self.reward_low:
            raise UserError(
                f"{where}: reward_high {self.reward_high:g} is not above reward_low "
                f"{self.reward_low:g}; raise it"
            )

    def scaled(self, reward: float, whose: str) -> float:
        """A reward in [0, 1]; raises `NotGradable` for one outside the range."""
        low, high = self.reward_low, self.reward_high
        if not low <= reward <= high:
            raise NotGradable(
                f"{whose} gives the reward {reward:g}, outside reward_low {low:g} to reward_high "
                f"{high:g}; widen these options"
            )
        return (reward - low) / (high - low)


class Tasks(Protocol):
    """The tasks of an environment; `peers.environments.tasks` has ready-made ones."""

    def draw(self, seed: bytes, split: Split) -> Task:
        """The task of a seed, the same in every process; no held-out prompt is one of training."""


class SingleTurn(ABC):
    """An environment whose episodes are a prompt and one completion.

    A change to any task or grade needs a new `version`. The class is constructed without arguments,
    or with an instance of its `Options` that holds the options in the run manifest."""

    name: str
    version: str
    Options: ClassVar[type[msgspec.Struct] | None] = None
    options: Any
    replayable: bool = True
    """Whether equal turns get equal observations on every machine. If not, a run must be served:
    a validator that replayed an honest episode would find another."""
    safe_for_strangers: ClassVar[bool] = False
    """Whether anybody may choose the options: the class starts no program that they name, opens no
    path or address of theirs, and needs bounded memory and time. A subclass states it itself."""
    call_seconds: float = 30.0
    """The longest that any one call of the environment's code may take."""

    def __init__(self, options: Any = None) -> None:
        self.options = self.Options() if options is None and self.Options else options

    @abstractmethod
    def tasks(self) -> Tasks:
        """The environment's tasks; called once."""

    @abstractmethod
    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """The reward of an episode, in [0, 1]; 0 for text that makes no sense.

        Raises `NotGradable` when the reward cannot be known here, and must not raise otherwise."""

    def pins(self) -> Mapping[str, OptionValue]:
        """Options that `swarm run create` writes into the manifest, such as the hash of a file."""
        return {}

    @cached_property
    def cached_tasks(self) -> Tasks:
        """The tasks, made on first use."""
        return self.tasks()


class Episodes(SingleTurn):
    """An environment that answers the model, in episodes of several turns."""

    @abstractmethod
    def start(self, task: Task) -> Any:
        """Begin an episode, and return its state: any object, dropped when the episode is over."""

    @abstractmethod
    def step(self, state: Any, text: str) -> str | tuple[Message, ...] | None:
        """The observation after the model's turn `text`, or None at the end of the episode.

        Called only after a turn that ended with a stop token. Equal turns must give equal
        observations, because a validator replays every episode."""

    def check_template(self, template: ChatTemplate) -> None:
        """Raise `UserError` for a chat template that the prompts do not fit."""


Environment = SingleTurn
"""Any environment: `Episodes` are single-turn environments that may answer."""


class Wrapper(SingleTurn):
    """Another environment under the same name, with other tasks or grades; grades and episodes see
    the inner environment's own task."""

    def __init__(self, inner: Environment) -> None:
        self.inner = inner
        self.name, self.version = inner.name, inner.version
        self.call_seconds = inner.call_seconds

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        """It may only be known once a task was drawn."""
        return self.inner.replayable

    def tasks(self) -> Tasks:
        return self.inner.tasks()

    def pins(self) -> Mapping[str, OptionValue]:
        return self.inner.pins()

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        return self.inner.grade(task, transcript)


def episodes_of(environment: Environment) -> Episodes | None:
    """The environment that answers the model, itself or wrapped; None if none does."""
    if isinstance(environment, Wrapper):
        return episodes_of(environment.inner)
    return environment if isinstance(environment, Episodes) else None
