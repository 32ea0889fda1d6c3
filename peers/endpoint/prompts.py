"""The three kinds of prompts, and how each extends an episode without encoding its tokens again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from peers.endpoint.tools import CallForm, alike, answer_of, answered
from peers.environments.chat_tokens import ChatTokens
from peers.environments.interface import Message
from peers.environments.renderer import Renderer
from swarm.rollouts.rollout import Finish


@dataclass(frozen=True)
class ChatSeen:
    """Messages, and the tools beside them as JSON."""

    messages: tuple[Message, ...]
    tools: str


Seen = str | ChatSeen | None
"""What a client has seen of an episode: a text, messages, or nothing but token ids."""


@dataclass(frozen=True)
class Past:
    """An episode as a prompt may extend it."""

    tokens: Sequence[int]
    seen: Seen
    first: Seen
    """What the client sent as its first prompt."""


class Prompt(Protocol):
    """What a client sends before a model segment."""

    @property
    def seen(self) -> Seen: ...

    def whole(self) -> list[int]:
        """Its token ids, as the beginning of an episode; raises `UserError`."""
        ...

    def after(self, past: Past) -> list[int] | None:
        """The token ids that follow an episode's; None unless the prompt extends it."""
        ...

    def answered(self, text: str, finish: Finish) -> Seen:
        """What the client has seen once it has the model's answer."""
        ...


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids."""

    tokens: Sequence[int]
    seen: Seen = None

    def whole(self) -> list[int]:
        return list(self.tokens)

    def after(self, past: Past) -> list[int] | None:
        length = len(past.tokens)
        extends = len(self.tokens) > length and list(self.tokens[:length]) == list(past.tokens)
        return list(self.tokens[length:]) if extends else None

    def answered(self, text: str, finish: Finish) -> Seen:
        return None


@dataclass(frozen=True)
class TextPrompt:
    """A text, completed without a template."""

    text: str
    renderer: Renderer

    @property
    def seen(self) -> Seen:
        return self.text

    def whole(self) -> list[int]:
        return self.renderer.encode_prompt(self.text)

    def after(self, past: Past) -> list[int] | None:
        if not isinstance(past.seen, str) or not self.text.startswith(past.seen):
            return None
        return self.renderer.encode_completion(self.text[len(past.seen) :])

    def answered(self, text: str, finish: Finish) -> Seen:
        return self.text + text


@dataclass(frozen=True)
class ChatPrompt:
    """Messages, rendered by the checkpoint's chat template."""

    messages: tuple[Message, ...]
    chat: ChatTokens
    tools: str = ""
    """JSON of the tools' definitions; empty: there are none."""
    form: CallForm | None = None
    """How the template writes calls, if there are tools."""

    @property
    def seen(self) -> Seen:
        return ChatSeen(self.messages, self.tools)

    def whole(self) -> list[int]:
        return self.chat.prompt(self.messages, self._variables)

    def after(self, past: Past) -> list[int] | None:
        if not isinstance(past.seen, ChatSeen) or not isinstance(past.first, ChatSeen):
            return None
        length = len(past.seen.messages)
        added = self.messages[length:]
        if past.seen.tools != self.tools or not added:
            return None
        if not alike(self.messages[:length], past.seen.messages):
            return None
        if any(each.role == "assistant" for each in added):
            return None  # the client speaks for the model: these tokens were not sampled
        return self.chat.after_turn(past.first.messages, self._variables, added, past.tokens[-1])

    def answered(self, text: str, finish: Finish) -> Seen:
        message = answered(*answer_of(text, finish, self.form))
        return ChatSeen((*self.messages, message), self.tools)

    @property
    def _variables(self) -> dict[str, Any]:
        return {"tools": json.loads(self.tools)} if self.tools else {}
