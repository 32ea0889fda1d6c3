"""The rendering of prompts, observations and completions into token ids, without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import blake3
import tokenizers

from peers.environments.interface import Message, Prompt
from swarm.errors import UserError


class Renderer:
    """The tokenizer of a Hugging Face model folder."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/tokenizer.json; raises `UserError` when it is missing or broken."""
        path = folder / "tokenizer.json"
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UserError(f"tokenizer {path} cannot be read ({error.strerror})") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"{path} is no tokenizer file ({error})") from error
        self.tokenizer_hash: bytes = blake3.blake3(raw).digest()
        """BLAKE3-256 of the bytes of tokenizer.json."""

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds (`<bos>`).

        Raises `UserError` for messages.
        """
        return list(self._tokenizer.encode(_text(prompt)).ids)

    def encode_observation(self, observation: str | tuple[Message, ...]) -> list[int]:
        """Token ids of an environment's turn; raises `UserError` for messages."""
        return self.encode_completion(_text(observation))

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion's text, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode_completion(self, tokens: Sequence[int], stop_ids: Sequence[int]) -> tuple[str, bool]:
        """Decode a completion into (text without its final stop token, finished).

        Any other special token stays visible in the text, so that no grader overlooks it.
        Raises `ValueError` for an id outside every vocabulary.
        """
        if any(not 0 <= token < 1 << 31 for token in tokens):
            raise ValueError("a token id is negative or beyond 31 bits")
        finished = bool(tokens) and tokens[-1] in stop_ids
        kept = tokens[:-1] if finished else tokens
        return self._tokenizer.decode(list(kept), skip_special_tokens=False), finished


def _text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise UserError(
            "a prompt or an observation consists of messages, which no chat template renders here; "
            "use an environment that writes text"
        )
    return prompt
