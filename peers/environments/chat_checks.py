"""What a chat template must do before a run relies on it: end turns, and leave earlier ones alone.

In an episode of several turns the model sees its own tokens as it wrote them. A template that
writes earlier turns otherwise, as by removing thoughts, makes a different prompt of the same
conversation, so that the model would be trained on what nobody shows it later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peers.environments.chat import Chat
from peers.environments.chat_template import TURN, ChatTemplate
from peers.environments.interface import Environment, Message, Prompt, Wrapper, messages_of
from peers.environments.renderer import Renderer, variables_of
from swarm.errors import UserError

THOUGHT = "thought of the turn"


def check_stop_ids(
    renderer: Renderer, prompt: Prompt, stop_ids: Sequence[int], where: str
) -> list[str]:
    """Check that a run's completions end where the template ends a turn.

    Returns warnings; raises `UserError`, which begins with `where`.
    """
    ends = renderer.turn_end(prompt)
    if ends is None:
        return [
            f"{renderer.chat.template.where}: the chat template ends a turn with text and no "
            "control token, so that the model must learn to end it with one of sampling.stop_ids"
        ]
    if ends not in stop_ids:
        raise UserError(
            f"{where}: sampling.stop_ids lacks {ends} ({renderer.chat.text_of(ends)}), with which "
            "the chat template ends the model's turn; add it"
        )
    return []


def check_history(
    environment: Environment,
    renderer: Renderer,
    prompt: Prompt,
    observation: str | tuple[Message, ...],
) -> None:
    """Raise `UserError` for a template that writes earlier turns otherwise than the model.

    The option `history = "keep"` turns this off.
    """
    template, variables = renderer.chat.template, variables_of(prompt)
    messages, observed = messages_of(prompt), messages_of(observation)
    changes = _change(template, messages, observed, variables)
    if changes and not _keeps(environment):
        raise UserError(
            f"{template.where}: the chat template {changes} when an observation of the role "
            f"{observed[0].role} follows, so that the model would see another conversation in "
            f"training than in use; let environment {environment.name!r} answer with another role "
            '(tool), change the template, or set its option history = "keep" to train on turns as '
            "they were written"
        )


def _change(
    template: ChatTemplate,
    messages: Sequence[Message],
    observed: Sequence[Message],
    variables: Mapping[str, Any],
) -> str:
    """What the template does to earlier turns; empty if it leaves them alone."""

    def written(*after: Message) -> str:
        chat = [each.fields() for each in (*messages, *after)]
        return template.render(chat, variables, prompts=True)

    prompt = written()
    turn = TURN
    if "</think>" in template.source and not prompt.rstrip().endswith("</think>"):
        begins = "" if prompt.rstrip().endswith("<think>") else "<think>\n"
        turn = f"{begins}{THOUGHT}\n</think>\n\n{TURN}"
    once = written(Message("assistant", turn), *observed)
    if not once.startswith(prompt) or not once[len(prompt) :].lstrip().startswith(turn):
        if turn != TURN and THOUGHT not in once:
            return "removes the thoughts of earlier turns"
        return "writes earlier turns otherwise than they were"
    earlier = (Message("assistant", "earlier"), *observed)
    again = written(*earlier, Message("assistant", TURN), *observed)
    if again.partition(TURN)[2] != once.partition(TURN)[2]:
        return "ends a later turn otherwise than the first"
    return ""


def _keeps(environment: Environment) -> bool:
    if isinstance(environment, Chat):
        return environment.keeps_history
    return isinstance(environment, Wrapper) and _keeps(environment.inner)
