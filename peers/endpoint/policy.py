"""The policy that an endpoint serves: its folder, name, tokenizer and stop ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.endpoint.tools import CallForm, form_of
from peers.engines.engine import Capabilities
from peers.environments.chat_template import ChatTemplate, ChatTokens
from peers.environments.renderer import Renderer, read_files
from swarm.errors import UserError


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


def policy_of(
    folder: Path,
    renderer: Renderer,
    name: str,
    stop_ids: Sequence[int],
    capabilities: Capabilities,
) -> Policy:
    """The policy in a folder, as an engine serves it; raises `UserError` for a broken template."""
    chat = chat_of(folder, renderer)
    calls: CallForm | str = "the model has no chat template"
    if chat is not None:
        try:
            calls = form_of(chat.template)
        except UserError as error:
            calls = str(error)
    return Policy(
        name=name,
        renderer=renderer,
        chat=chat,
        calls=calls,
        stop_ids=tuple(stop_ids),
        length_max=capabilities.length_max,
        engine_class=capabilities.engine_class,
    )


def chat_of(folder: Path, renderer: Renderer) -> ChatTokens | None:
    """The folder's chat template, or None without one; raises `UserError` for a broken one."""
    template = ChatTemplate.of_files(read_files(folder), str(folder))
    return None if template is None else renderer.chat
