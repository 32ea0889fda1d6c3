"""Turns whose text must follow a JSON schema, or call a tool: `outlines-core` says which tokens may
come next. The mask changes the policy's distribution, so they are never part of a rollout."""

import json
import re
import zlib
from array import array
from collections.abc import Sequence, Set
from functools import lru_cache
from pathlib import Path

import msgspec
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from peers.endpoint.errors import ApiError
from peers.endpoint.requests import ChatRequest
from peers.endpoint.tools import CallForm, forced_names
from peers.environments.graders.pool import Pool, ProcessFailed, ServiceError
from swarm.terminal.extras import require_extra

Structure = tuple[tuple[str, str, str], ...]
"""What a turn may be: each (the text before a JSON value, its schema, the text after it)."""

SCHEMA_BYTES_MAX = 1 << 16
WALL_SECONDS, CPU_SECONDS = 120.0, 60.0
"""Time to compile a schema. An array of a thousand elements, say, is a huge automaton."""
MEMORY_BYTES = 1 << 30
AUTOMATON_BYTES_MAX = 1 << 28
"""Most bytes of a compiled schema, which a client's schema decides: eight per move."""
KEPT = 32
"""Compiled schemas that are kept: some megabytes each, with a large vocabulary."""


class Automaton(msgspec.Struct, array_like=True, frozen=True):
    """A compiled schema, as plain data: its process has read what a client wrote."""

    initial: int
    moves: dict[int, tuple[bytes, bytes]]
    """By state the tokens that may follow, and the states to which they lead, each as uint32."""


def structure_of(asked: ChatRequest, calls: CallForm | None) -> Structure | None:
    """What a chat's answer must be, if it may not be any text; raises `ApiError`."""
    forced = forced_names(asked)
    schema = asked.response_format.wanted if asked.response_format is not None else None
    parts = [("", json.dumps(schema), "")] if schema is not None and not forced else []
    if calls is not None and (forced or parts):
        functions = [tool["function"] for tool in asked.tools or []]
        parts += [calls.written(each) for each in functions if each["name"] in forced or not forced]
    if sum(len(schema) for _, schema, _ in parts) > SCHEMA_BYTES_MAX:
        raise ApiError(
            f"the schema has more than {SCHEMA_BYTES_MAX} bytes; shorten it",
            param="response_format",
        )
    return tuple(parts) or None


class Compiler:
    """The service that compiles schemas, in a killable process."""

    def __init__(self, folder: str, stop_id: int) -> None:
        from outlines_core import Vocabulary

        raw = Path(folder, "tokenizer.json").read_text(encoding="utf-8")
        self._vocabulary = Vocabulary(stop_id, texts_of(raw, stop_id))

    def __call__(self, structure: Sequence[Sequence[str]]) -> bytes:
        """The automaton, compressed; raises `ValueError` for a schema that is not understood."""
        from outlines_core import Index
        from outlines_core.json_schema import build_regex_from_schema

        parts = [
            re.escape(before) + build_regex_from_schema(schema) + re.escape(after)
            for before, schema, after in structure
        ]
        index = Index("|".join(f"({part})" for part in parts), self._vocabulary)
        moves = {
            state: (array("I", to).tobytes(), array("I", to.values()).tobytes())
            for state, to in index.get_transitions().items()
        }
        found = Automaton(index.get_initial_state(), moves)
        return zlib.compress(msgspec.msgpack.encode(found), 1)


def texts_of(tokenizer: str, stop_id: int) -> dict[bytes, list[int]]:
    """The ids of each text that is a token, in bytes; special tokens have none."""
    made = tokenizers.Tokenizer.from_str(tokenizer)
    special = {id for id, each in made.get_added_tokens_decoder().items() if each.special}
    letters = set(ByteLevel.alphabet()) if '"ByteLevel"' in tokenizer else set()
    found: dict[bytes, list[int]] = {}
    for text, id in made.get_vocab().items():
        raw = _bytes_of(text, letters)
        if raw and id not in special and id != stop_id:
            found.setdefault(raw, []).append(id)
    return found


def _bytes_of(text: str, letters: Set[str]) -> bytes:
    """The bytes of a token. `letters`: those that stand for bytes in GPT-2's vocabularies, where
    printable ones are themselves and the others follow each other from U+0100 on."""
    if letters:
        others = [byte for byte in range(0x100) if chr(byte) not in letters]
        codes = [ord(letter) for letter in text if letter in letters]
        return bytes(code if code < 0x100 else others[code - 0x100] for code in codes)
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", text):
        return bytes.fromhex(byte[1])
    return text.replace("\u2581", " ").encode()


class Structures:
    """Compiles schemas for one policy, and keeps some."""

    def __init__(self, folder: Path, stop_ids: Sequence[int]) -> None:
        self._stop_ids = stop_ids
        arguments = {"folder": str(folder), "stop_id": stop_ids[0]}
        service = f"{__name__}:{Compiler.__name__}"
        self._pool = Pool(service, WALL_SECONDS, MEMORY_BYTES, CPU_SECONDS, arguments=arguments)
        self._compiled = lru_cache(KEPT)(self._compile)

    def mask(self, structure: Structure, prompt: int) -> "Following":
        """A mask after `prompt` tokens, in up to a minute. Raises `ApiError`, `UserError`."""
        require_extra("structured", "structured output")
        return Following(self._compiled(structure), self._stop_ids, prompt)

    def _compile(self, structure: Structure) -> Automaton:
        try:
            packed = self._pool.ask(structure)
            raw = zlib.decompressobj().decompress(packed, AUTOMATON_BYTES_MAX)
            found = msgspec.msgpack.decode(raw, type=Automaton)
            if any(len(each) != len(to) or len(to) % 4 for each, to in found.moves.values()):
                raise ServiceError("its automaton cannot be read")
            return found
        except (ServiceError, ProcessFailed, zlib.error, msgspec.DecodeError) as error:
            raise ApiError(
                f"the schema cannot be followed ({str(error)[:200]}); simplify it",
                param="response_format",
            ) from error


class Following:
    """`peers.engines.engine.Mask` of one turn."""

    def __init__(self, automaton: Automaton, stop_ids: Sequence[int], prompt: int) -> None:
        self._automaton, self._stop_ids, self._read = automaton, stop_ids, prompt
        self._enter(automaton.initial)

    def _enter(self, state: int) -> None:
        tokens, states = self._automaton.moves.get(state, (b"", b""))
        self._tokens, self._states = array("I", tokens), array("I", states)

    def allowed(self, tokens: Sequence[int]) -> Sequence[int]:
        for token in tokens[self._read :]:
            self._enter(self._states[self._tokens.index(token)])
        self._read = len(tokens)
        return self._tokens.tolist() or self._stop_ids
