"""The policy that an endpoint serves: its folder, name, tokenizer and stop ids."""

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
    capabilities: Capabilities
    """The engine's."""

    @property
    def length_max(self) -> int:
        return self.capabilities.length_max


def calls_of(chat: ChatTokens | None) -> CallForm | str:
    """How a chat template writes tool calls, or a sentence that says why it writes none."""
    if chat is None:
        return "the model has no chat template"
    try:
        return form_of(chat.template)
    except UserError as error:
        return str(error)


def chat_of(folder: Path, renderer: Renderer) -> ChatTokens | None:
    """The folder's chat template, or None without one; raises `UserError` for a broken one."""
    template = ChatTemplate.of_files(read_files(folder), str(folder))
    return None if template is None else renderer.chat
