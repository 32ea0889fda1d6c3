"""The rendering of prompts, observations and completions into token ids, without transformers.

Jinja is imported when a prompt of messages comes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3
import msgspec
import tokenizers

from peers.environments.interface import Conversation, Message, Prompt, messages_of
from swarm.errors import DECODE_ERRORS, UserError

if TYPE_CHECKING:
    from peers.environments.chat_template import ChatTokens


STOPS_FROM = ("generation_config.json", "config.json")
"""Files that may name the stop ids; the first that does counts."""


class Renderer:
    """The tokenizer and the chat template of a Hugging Face model folder."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/tokenizer.json, and the chat template's files for prompts of messages;
        raises `UserError` when the first is missing or broken."""
        path = folder / "tokenizer.json"
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UserError(f"tokenizer {path} cannot be read ({error.strerror})") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"{path} is no tokenizer file ({error})") from error
        # Some files keep what a training once cut or filled up its texts to.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.tokenizer_hash: bytes = blake3.blake3(raw).digest()
        self._folder, self._chat_files = folder, read_files(folder)
        self.files_hash: bytes = _files_hash(raw, self._chat_files)
        """BLAKE3-256 of all files that rendering depends on."""

    @classmethod
    def current(cls, folder: Path, known: Renderer | None) -> Renderer:
        """The folder's renderer; `known` if made of equal files: a large one loads in a second."""
        try:
            raw = (folder / "tokenizer.json").read_bytes()
        except OSError:
            return cls(folder)  # which reports the problem
        if known is not None and _files_hash(raw, read_files(folder)) == known.files_hash:
            return known
        return cls(folder)

    @cached_property
    def chat(self) -> ChatTokens:
        """The chat template; raises `UserError` when the folder has none, or a broken one."""
        from peers.environments.chat_template import ChatTokens

        return ChatTokens.of_files(self._chat_files, self._tokenizer, str(self._folder))

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Text gets the special tokens that the tokenizer adds (`<bos>`), messages those of the chat
        template and the beginning of the model's turn. Raises `UserError` for messages that the
        template does not render."""
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt).ids)
        return self.chat.prompt(messages_of(prompt), variables_of(prompt))

    def encode_observation(
        self, prompt: Prompt, observation: str | tuple[Message, ...], last: int
    ) -> list[int]:
        """Token ids between a turn of the model, which ended with the token `last`, and the next.

        After a prompt of text that is the observation's text. In a chat, text is a message of the
        user, and the template ends the model's turn and begins the next. Raises `UserError` for
        messages after a prompt of text, or that the template does not render."""
        if not isinstance(prompt, str):
            observed = messages_of(observation)
            return self.chat.after_turn(messages_of(prompt), variables_of(prompt), observed, last)
        if not isinstance(observation, str):
            raise UserError(
                "an environment answers a prompt of text with messages; give it the option chat = "
                "true, or use one that answers with text"
            )
        return self.encode_completion(observation)

    def turn_end(self, prompt: Prompt) -> int | None:
        """The control token with which the chat template ends the model's turn, if it has one."""
        return self.chat.closing_token(messages_of(prompt), variables_of(prompt))

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion's text, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode_completion(self, tokens: Sequence[int], stop_ids: Sequence[int]) -> tuple[str, bool]:
        """(text without its final stop token, finished); raises `ValueError` for an impossible id.

        Any other special token stays visible in the text, so that no grader overlooks it."""
        if any(not 0 <= token < 1 << 31 for token in tokens):
            raise ValueError("a token id is negative or beyond 31 bits")
        finished = bool(tokens) and tokens[-1] in stop_ids
        kept = tokens[:-1] if finished else tokens
        return self._tokenizer.decode(list(kept), skip_special_tokens=False), finished


class _Stops(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def stop_ids_of(folder: Path) -> list[int]:
    """The ids that end a completion (`eos_token_id`); raises `UserError` if no file names any."""
    for name in STOPS_FROM:
        path = folder / name
        if not path.exists():
            continue
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Stops).eos_token_id
        except (OSError, *DECODE_ERRORS) as error:
            raise UserError(
                f"{path}: eos_token_id must be a token id or a list of them ({error})"
            ) from error
        if found is not None:
            return list(dict.fromkeys([found] if isinstance(found, int) else found))
    raise UserError(
        f"{folder} names no eos_token_id in {' or '.join(STOPS_FROM)}, so completions would never "
        "end; add it to generation_config.json"
    )


def variables_of(prompt: Prompt) -> dict[str, Any]:
    found: dict[str, Any] = dict(prompt.variables) if isinstance(prompt, Conversation) else {}
    if "tools" in found:
        found["tools"] = json.loads(found["tools"])
    return found


def _files_hash(tokenizer: bytes, chat_files: Mapping[str, bytes]) -> bytes:
    parts = (tokenizer, *(chat_files.get(name, b"") for name in FILES))
    return blake3.blake3(b"".join(blake3.blake3(part).digest() for part in parts)).digest()


FILES = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json")
"""Of the first two the first that has a template wins, as in transformers. The third names tokens
that the second leaves out."""

BYTES_MAX = 16 << 20
"""Size of one file; the largest in use, for 262,000 tokens, has 1.2 MB."""


def read_files(folder: Path) -> dict[str, bytes]:
    """The contents of those of `FILES` that exist in `folder`; raises `UserError`."""
    return {name: _read(folder / name) for name in FILES if (folder / name).exists()}


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size <= BYTES_MAX:
            return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    raise UserError(f"{path} has {size} bytes; {BYTES_MAX} are the most; use the checkpoint's own")
