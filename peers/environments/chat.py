"""Chat: options that any environment has, for prompts that the checkpoint's template renders."""

import datetime
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from peers.environments import interface
from peers.environments.pairs import PAIR, json_pairs
from peers.environments.tasks import Changed
from swarm.errors import UserError

Text = Annotated[str, Meta(min_length=1, max_length=1000)]

GIVEN = ("add_generation_prompt", "chat_date", "documents", "messages", "self", "tools")
"""Variables of a template that come from the prompt, or from an option that checks them."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that make a chat of any environment's prompts (docs/environments.md)."""

    chat: bool = True
    system_prompt: Text | None = None
    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Text | None = None
    template_variables: Annotated[
        list[Annotated[str, Meta(pattern=PAIR, max_length=1000)]], Meta(max_length=32)
    ] = []
    chat_date: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d\Z")] | None = None
    history: Literal["template", "keep"] = "template"
    answer_after: Text | None = None


class Chat(interface.Wrapper):
    """An environment whose prompts are chats."""

    def __init__(self, inner: interface.Environment, options: ChatOptions) -> None:
        """Raises `UserError` for options that contradict each other."""
        super().__init__(inner)
        self.options = options
        self.keeps_history = options.history == "keep"
        self.variables = _variables(options, f"environment {inner.name!r}: options")

    def tasks(self) -> interface.Tasks:
        return Changed(self.inner.cached_tasks, self._as_chat)

    def grade(
        self, task: interface.Task, transcript: interface.Transcript
    ) -> float | interface.Grade:
        if (mark := self.options.answer_after) is not None:
            turns = tuple(
                turn
                if turn.kind != "model"
                else replace(turn, text=turn.text.rpartition(mark)[2] if mark in turn.text else "")
                for turn in transcript.turns
            )
            transcript = replace(transcript, turns=turns)
        return self.inner.grade(task, transcript)

    def _as_chat(self, task: interface.Task, seed: bytes) -> interface.Task:
        if isinstance(task.prompt, str) and not self.options.chat:
            return task
        system = self.options.system_prompt
        messages = interface.messages_of(task.prompt)
        if system is not None:
            rest = messages[1:] if messages[0].role == "system" else messages
            messages = (interface.Message("system", system), *rest)
        own = task.prompt.variables if isinstance(task.prompt, interface.Conversation) else ()
        prompt = interface.Conversation(messages, (*own, *self.variables.items()))
        return replace(task, prompt=prompt, inner=task)


def _variables(options: ChatOptions, where: str) -> Mapping[str, Any]:
    """The variables that the template gets; raises `UserError`."""
    found = json_pairs(options.template_variables, f"{where}: template_variables")
    for name, value in found.items():
        if name in GIVEN:
            raise UserError(
                f"{where}: template_variables gives {name}, which a template gets from the prompt "
                "or from an option of its own; remove it there"
            )
        if not isinstance(value, (bool, int, float, str)):
            raise UserError(
                f"{where}: template_variables gives {name} the value {json.dumps(value):.60}; it "
                "must be a number, text, true or false"
            )
    for name in ("enable_thinking", "thinking", "reasoning_effort"):
        if (value := getattr(options, name)) is not None:
            found[name] = value
    if options.chat_date is not None:
        try:
            datetime.date.fromisoformat(options.chat_date)
        except ValueError as error:
            raise UserError(
                f"{where}: chat_date is {options.chat_date!r} ({error}); give a day of the calendar"
            ) from error
        found["chat_date"] = options.chat_date
    named = [*found, *(["system_prompt"] if options.system_prompt else [])]
    if named and not options.chat:
        raise UserError(
            f"{where}: chat is false, but {named[0]} is given, which only a chat has; remove one "
            "of the two"
        )
    return found
