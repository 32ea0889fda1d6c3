"""Sessions: what an agent's requests become, token by token.

A request whose prompt extends an episode continues it, and the tokens between what the model wrote
and the prompt's end are the environment's. Any other opens one. What the model sampled is never
encoded again, only the rest of a text that begins with an episode's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from peers.endpoint.sampling import Sampled
from peers.endpoint.tools import CallForm, alike, answer_of, answered
from peers.engines.episodes import SpanStates
from peers.environments.chat_template import ChatTokens
from peers.environments.interface import Message
from peers.environments.renderer import Renderer
from peers.environments.run_probe import change_of_history
from peers.proofs import toploc
from peers.proofs.format import CHUNK_TOKENS, TOP_VALUES
from swarm.rollouts import seeds
from swarm.rollouts.rollout import TURNS_MAX, Finish, Rollout, Segment

THOUGHT_END = "</think>"


@dataclass(frozen=True)
class ChatSeen:
    """Messages, and the tools beside them as JSON."""

    messages: tuple[Message, ...]
    tools: str


Seen = str | ChatSeen | None
"""What a client has seen of an episode: a text, messages, or nothing but token ids."""


# What a client sends before a model segment: `seen` and `answered` are what it has seen, before and
# after the model's answer; `whole` its token ids as an episode's beginning (raises `UserError`);
# `after` those that follow an episode's, or None unless the prompt extends it.


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids."""

    tokens: Sequence[int]
    seen: Seen = None

    def whole(self) -> list[int]:
        return list(self.tokens)

    def after(self, past: "Episode") -> list[int] | None:
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

    def after(self, past: "Episode") -> list[int] | None:
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

    def after(self, past: "Episode") -> list[int] | None:
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
        first, template = past.first.messages, self.chat.template
        thought = THOUGHT_END in past.seen.messages[-1].content
        if thought and change_of_history(template, first, added, self._variables):
            return None  # a branch: the model is to see the turns before without their thoughts
        return self.chat.after_turn(past.first.messages, self._variables, added, past.tokens[-1])

    def answered(self, text: str, finish: Finish) -> Seen:
        message = answered(*answer_of(text, finish, self.form))
        return ChatSeen((*self.messages, message), self.tools)

    @property
    def _variables(self) -> dict[str, Any]:
        return {"tools": json.loads(self.tools)} if self.tools else {}


Prompt = TokenPrompt | TextPrompt | ChatPrompt

EPISODES_MAX = 1024
"""Episodes of one session; a request beyond is refused."""


class Draw(msgspec.Struct, frozen=True):
    """How one model segment was sampled; with the seed anyone can do it again."""

    key: tuple[int, int] | None
    """Key of the Philox noise; None: the likeliest tokens."""
    temperature: float
    row: int
    """Row of the noise."""
    start: int
    """Position of its first token in the row."""


class GrowingProof:
    """Builds an episode's proofs as it grows, so that few hidden states are kept."""

    def __init__(self) -> None:
        self._policy: int | None = None
        self._before = torch.empty(0)
        self._rows = torch.empty(0)
        self._built: list[bytes] = []

    def add(self, states: Sequence[SpanStates]) -> None:
        """Add a segment's hidden states, and prove all full chunks. A policy begins a chunk."""
        for span in states:
            if span.policy == self._policy:
                self._rows = torch.cat((self._rows, span.hidden))
            else:
                self._built += self._unfinished()
                self._policy, self._before, self._rows = span.policy, span.before, span.hidden
            full = len(self._rows) // CHUNK_TOKENS * CHUNK_TOKENS
            if full:
                self._built += toploc.build(toploc.chunk_rows(self._before, self._rows[:full]))
                self._before = torch.cat((self._before, self._rows[:full]))[-TOP_VALUES:].clone()
                self._rows = self._rows[full:].clone()

    def finish(self) -> bytes:
        """All proofs, that of an unfinished chunk included."""
        return b"".join([*self._built, *self._unfinished()])

    def _unfinished(self) -> list[bytes]:
        return toploc.build(toploc.chunk_rows(self._before, self._rows)) if len(self._rows) else []


@dataclass
class Episode:
    """Requests of which each extends the one before."""

    row: int
    """Its index in the session, and the row of its noise."""
    tokens: list[int]
    """Of all segments."""
    seen: Seen
    """What the client has seen of it."""
    first: Seen
    """What it sent as the first prompt."""
    segments: list[Segment] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    """Of each model segment."""
    proof: GrowingProof | None = None
    last: int | None = None
    """The engine's request that kept the cache."""
    busy: bool = True
    """Whether a request is extending it."""
    is_structured: bool = False
    """Whether its turn had to follow a grammar: it is no rollout, and a further turn is a fork."""

    @property
    def sampled(self) -> int:
        """Model tokens."""
        return sum(len(each.tokens) for each in self.segments if each.kind == "model")

    @property
    def turns(self) -> int:
        return sum(each.kind == "model" for each in self.segments)

    def may_go_on(self) -> bool:
        """Whether a rollout may have another turn after its last."""
        ended = bool(self.segments) and self.segments[-1].finish == "stop"
        is_rollout = not self.is_structured
        return not self.busy and ended and is_rollout and self.turns < TURNS_MAX


@dataclass
class Turn:
    """A model segment that is about to be sampled."""

    session: "Session"
    episode: Episode
    added: list[int]
    """The environment's tokens before it; empty in a new episode."""
    prompt: Prompt
    is_open: bool = True
    """Whether its episode waits for the segment."""

    @property
    def tokens(self) -> list[int]:
        """All tokens before the segment."""
        return [*self.episode.tokens, *self.added]

    def end(self, sampled: Sampled, draw: Draw) -> None:
        """Append the finished segment to the episode."""
        episode = self.episode
        if self.added:
            episode.segments.append(Segment("environment", self.added))
        episode.segments.append(
            Segment(
                "model", sampled.tokens, sampled.finish, sampled.log_probabilities, sampled.spans
            )
        )
        episode.tokens += [*self.added, *sampled.tokens]
        episode.seen = self.prompt.answered(sampled.text, sampled.finish)
        episode.draws.append(draw)
        if episode.proof is not None:
            episode.proof.add(sampled.states)
        episode.last, episode.busy, self.is_open = sampled.last, False, False

    def give_up(self, began: bool = False) -> None:
        """Forget the segment; `began`: its sampling has used up the episode's kept cache."""
        if not self.is_open:
            return
        self.episode.busy = self.is_open = False
        if began:
            self.episode.last = None
        if not self.episode.draws:
            self.session.episodes.remove(self.episode)


@dataclass
class Session:
    """The episodes of one agent."""

    name: str
    number: int
    """Number of the submission that it becomes."""
    seed: bytes
    """Seed of the submission: noise follows from it, unless a request gives another."""
    proves: bool
    touched: float = 0.0
    """Time of the last request."""
    episodes: list[Episode] = field(default_factory=list)
    rows: int = 0
    """Episodes that were ever opened."""

    @property
    def key(self) -> tuple[int, int]:
        return seeds.noise_key(self.seed)

    @property
    def is_idle(self) -> bool:
        return not any(episode.busy for episode in self.episodes)

    def begin(self, prompt: Prompt, is_structured: bool = False) -> Turn:
        """Continue the longest episode that the prompt extends, or open one with its tokens.

        Not continued are episodes that another request is extending or that ended at the token
        limit, and none by a turn that follows a grammar. Raises `ValueError` for a session with
        `EPISODES_MAX` episodes, and `UserError` as `Prompt.whole`."""
        best: Episode | None = None
        added: list[int] = []
        for episode in self.episodes:
            if best is None or len(episode.tokens) > len(best.tokens):
                rest = prompt.after(episode)
                if episode.draws and rest:
                    best, added = episode, rest
        if best is not None and best.may_go_on() and not is_structured:
            best.busy = True
            return Turn(self, best, added, prompt)
        if self.rows >= EPISODES_MAX:
            raise ValueError(
                f"session {self.name!r} has {self.rows} episodes, the most that one may have; "
                "post its reward, or begin another session"
            )
        whole = prompt.whole() if best is None else [*best.tokens, *added]
        episode = Episode(self.rows, whole, prompt.seen, prompt.seen, is_structured=is_structured)
        episode.segments.append(Segment("prompt", list(whole)))
        episode.proof = GrowingProof() if self.proves else None
        self.rows += 1
        self.episodes.append(episode)
        return Turn(self, episode, [], prompt)

    def rollouts(self) -> list[tuple[Episode, Rollout]]:
        """The finished episodes, but for those whose turn had to follow a grammar."""
        return [
            (episode, Rollout(tuple(episode.segments)))
            for episode in self.episodes
            if episode.draws and not episode.is_structured
        ]
