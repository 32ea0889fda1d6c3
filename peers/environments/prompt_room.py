"""Which prompts a model can be given, by its config.json: with tokens, and room for an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from peers.engines.config import read_config, read_text_config
from peers.environments.interface import Prompt, UnusableTask, as_text, messages_of
from swarm.errors import DECODE_ERRORS, UserError
from swarm.world.recent import Recent

if TYPE_CHECKING:
    from peers.environments.renderer import Renderer


class ModelFacts(msgspec.Struct, frozen=True):
    """Fields of config.json that bound token ids and episodes."""

    vocab_size: int
    """Size of the model's vocabulary, which may be larger than the tokenizer's."""
    max_position_embeddings: int
    """The context length."""

    @classmethod
    def read(cls, folder: Path) -> ModelFacts:
        try:
            return msgspec.json.decode((folder / "config.json").read_bytes(), type=cls)
        except (OSError, *DECODE_ERRORS) as error:
            found = read_config(folder)
            if "model_type" in found:
                text = read_text_config(folder)  # the family names them otherwise
                return cls(text["vocab_size"], text["max_position_embeddings"])
            raise UserError(
                f"{folder} has no config.json that gives vocab_size and max_position_embeddings "
                f"({error})"
            ) from error


CHARACTERS_PER_TOKEN_MAX = 256
"""Longest text of one token in the vocabularies in use is half of this: 128 spaces. A prompt with
more characters than this for each token is too long without being tokenized."""

PROMPTS_KEPT = 64


@dataclass(frozen=True)
class PromptRoom:
    """Encodes prompts of at most so many tokens.

    Worker, validator and environment peer must find the same, since an unusable prompt makes the
    seed draw another task: so it depends on files of the policy and on the manifest only."""

    renderer: Renderer
    tokens_max: int | None = None
    """None: any length."""
    _kept: Recent[tuple[Prompt, str], list[int]] = field(
        default_factory=lambda: Recent(PROMPTS_KEPT), repr=False
    )
    """Of the last prompts, because a drawn prompt is encoded next. With the text of its variables:
    1, 1.0 and true are equal to Python, and templates write them differently."""

    @classmethod
    def of_policy(cls, renderer: Renderer, positions: int, max_new_tokens: int) -> PromptRoom:
        """Room for the prompts after which a model may still sample so many tokens."""
        return cls(renderer, max(0, positions - max_new_tokens))

    def at_most(self, tokens: int) -> PromptRoom:
        """The same with another limit, if that is smaller."""
        limit = tokens if self.tokens_max is None else min(tokens, self.tokens_max)
        return PromptRoom(self.renderer, limit)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; raises `UnusableTask` for one that the model cannot be given."""
        key = prompt, repr(getattr(prompt, "variables", ()))
        return self._kept.of(key, lambda: self._encoded(prompt))

    def _encoded(self, prompt: Prompt) -> list[int]:
        shown, limit = f"the prompt {as_text(prompt)!r:.80}", self.tokens_max
        characters = sum(len(each.content) for each in messages_of(prompt))
        if limit is not None and characters > limit * CHARACTERS_PER_TOKEN_MAX:
            raise UnusableTask(
                f"{shown} has {characters} characters; {limit} tokens are the most that leave room "
                "for an answer"
            )
        try:
            tokens = self.renderer.encode_prompt(prompt)
        except UserError as error:
            if isinstance(error.__cause__, MemoryError | RecursionError):
                raise  # of this process, not of the prompt: another may render it
            raise UnusableTask(f"{shown} cannot be rendered: {error}") from error
        if not tokens:
            raise UnusableTask(f"{shown} has no tokens; leave such tasks out")
        if limit is not None and len(tokens) > limit:
            raise UnusableTask(
                f"{shown} has {len(tokens)} tokens; {limit} are the most that leave room for an "
                "answer"
            )
        return tokens


@contextmanager
def shorter_answers() -> Iterator[None]:
    """Say, where no task of an environment is usable, that shorter answers may be the way out."""
    try:
        yield
    except UnusableTask as error:
        raise UserError(
            f"{error}; give a smaller --max-new-tokens if the prompt is too long, or other tasks"
        ) from error
