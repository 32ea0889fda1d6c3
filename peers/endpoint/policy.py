"""The policy that an endpoint serves: its folder, name, tokenizer and stop ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from peers.endpoint.tools import CallForm, form_of
from peers.environments.chat_files import read_files
from peers.environments.chat_template import ChatTemplate
from peers.environments.chat_tokens import ChatTokens
from peers.environments.renderer import Renderer
from swarm.errors import DECODE_ERRORS, UserError

STOPS_FROM = ("generation_config.json", "config.json")
"""Files that may name the stop ids; the first that does counts."""


@dataclass(frozen=True)
class Policy:
    """What is served."""

    name: str
    """As clients name the model."""
    renderer: Renderer
    chat: ChatTokens | None
    """None: the checkpoint has no chat template."""
    calls: CallForm | str
    """How its template writes tool calls, or a sentence that says why it writes none."""
    stop_ids: tuple[int, ...]
    length_max: int
    engine_class: str


def calls_of(chat: ChatTokens | None) -> CallForm | str:
    """How a template writes tool calls, or a sentence that says why it writes none."""
    if chat is None:
        return "the model has no chat template"
    try:
        return form_of(chat.template)
    except UserError as error:
        return str(error)


class _Stops(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def stop_ids_of(folder: Path) -> tuple[int, ...]:
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
            return tuple(dict.fromkeys([found] if isinstance(found, int) else found))
    raise UserError(
        f"{folder} names no eos_token_id in {' or '.join(STOPS_FROM)}, so completions would never "
        "end; add it to generation_config.json"
    )


def chat_of(folder: Path, renderer: Renderer) -> ChatTokens | None:
    """The folder's chat template, or None without one; raises `UserError` for a broken one."""
    template = ChatTemplate.of_files(read_files(folder), str(folder))
    return None if template is None else renderer.chat
