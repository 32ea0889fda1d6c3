"""The messages of rollouts, which hold tokens only: a chat template read backwards.

A candidate is cut out of the decoded text. It counts only if rendering it gives the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

from peers.environments import Renderer
from peers.environments.interface import Message
from swarm.errors import UserError
from swarm.look.rollouts.seen import Turn

PROMPTS = (("user",), ("system", "user"))
"""Roles of the prompts that are recognised."""

OBSERVATIONS = (("user",), ("tool",))
"""Roles of what an environment says between the model's turns."""

MARKS = ("16180339887498948482", "27182818284590452353")
"""Stand for the contents; every tokenizer gives digits back as they were."""

Render = Callable[[tuple[Message, ...]], list[int]]


class ChatReader:
    """Reads messages with the tokenizer and the chat template of a model folder."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._pattern = cache(self._make_pattern)

    def messages(self, turns: Sequence[Turn]) -> list[dict[str, str]] | None:
        """The chat of a rollout; None if its prompt is no chat, or not of a form known here."""
        try:
            found = self._read(PROMPTS, self._renderer.encode_prompt, turns[0].tokens)
            prompt = found
            for before, turn in pairwise(turns):
                if found is None or prompt is None:
                    return None
                if turn.kind == "model":
                    found = (*found, Message("assistant", self._written(turn)))
                    continue
                said = self._observed(prompt, before.tokens[-1], turn.tokens)
                found = None if said is None else (*found, *said)
        except (UserError, ValueError):  # no chat template, or one that refuses these messages
            return None
        return None if found is None else [each.fields() for each in found]

    def _written(self, turn: Turn) -> str:
        """What the model wrote, without the token that ended its turn."""
        tokens = turn.tokens[:-1] if turn.finish == "stop" else turn.tokens
        return self._renderer.decode_completion(tokens, ())[0]

    def _observed(
        self, prompt: tuple[Message, ...], last: int, tokens: Sequence[int]
    ) -> tuple[Message, ...] | None:
        def render(messages: tuple[Message, ...]) -> list[int]:
            return self._renderer.encode_observation(prompt, messages, last)

        return self._read(OBSERVATIONS, render, tokens)

    def _read(
        self, forms: Sequence[tuple[str, ...]], render: Render, tokens: Sequence[int]
    ) -> tuple[Message, ...] | None:
        """The messages that `render` turns into these tokens."""
        text = self._renderer.decode_completion(tokens, ())[0]
        for roles in forms:
            marked = tuple(map(Message, roles, MARKS))
            try:
                pattern = self._pattern(tuple(render(marked)))
            except UserError:
                continue  # such as a template without system messages
            if (found := pattern.fullmatch(text)) is None:
                continue
            messages = tuple(map(Message, roles, found.groups()))
            if len(found.groups()) == len(roles) and render(messages) == list(tokens):
                return messages
        return None

    def _make_pattern(self, tokens: tuple[int, ...]) -> re.Pattern[str]:
        """What the text of marked messages looks like with any contents."""
        text = self._renderer.decode_completion(tokens, ())[0]
        pattern = re.escape(text)
        for mark in MARKS:
            pattern = pattern.replace(mark, "(.*?)", 1)
        return re.compile(pattern, re.DOTALL)
