"""A checkpoint's chat template: the Jinja text that turns messages into a prompt.

The templates are rendered by Jinja's sandbox (`peers.environments.template_sandbox`) with the
settings of transformers, whose import would take a second in every process that renders. (The
package `renderers` has code of its own for some models instead of the checkpoint's template, and
needs clients of remote services.) Unlike there, the date is not that of the day, because a prompt
must be the same on every machine.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from peers.environments.chat_files import FILES
from peers.environments.template_sandbox import Sandbox, limited
from swarm.errors import UserError

CHARACTERS_MAX = 1 << 17
"""Size of a template; the longest in use have 20,000."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
"""Tokens that a template may use as variables, by their keys in the tokenizer's files."""

Chat = Sequence[Mapping[str, Any]]
"""Messages, each with `role` and `content`, and perhaps with calls of tools."""


class ChatTemplate:
    """The template of one checkpoint."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """Compile `source`; `where` names its file in errors. Raises `UserError`."""
        self.source, self.tokens, self.where = source, dict(tokens), where
        if len(source) > CHARACTERS_MAX:
            raise UserError(
                f"{where}: the chat template has {len(source)} characters; at most "
                f"{CHARACTERS_MAX} are allowed; shorten it"
            )
        try:
            self._template = Sandbox().from_string(source)
        except (
            jinja2.TemplateError,
            SyntaxError,
            ValueError,
            ArithmeticError,
            TypeError,
            RecursionError,
        ) as error:
            raise UserError(
                f"{where}: the chat template is no valid Jinja ({_described(error)}); repair it"
            ) from error

    @classmethod
    def of_files(cls, files: Mapping[str, bytes], where: str) -> ChatTemplate | None:
        """The template in a model folder's `FILES`, or None; raises `UserError`.

        `where` names the folder.
        """
        config = _config(files.get(FILES[1], b"{}"), f"{where}/{FILES[1]}")
        mapped = _config(files.get(FILES[2], b"{}"), f"{where}/{FILES[2]}")
        tokens = {
            name: _text_of(config.get(name)) or _text_of(mapped.get(name)) for name in NAMED_TOKENS
        }
        named = {name: text for name, text in tokens.items() if text is not None}
        raw = files.get(FILES[0])
        if raw is None:
            source = _default(config.get("chat_template"))
            return None if source is None else cls(source, named, f"{where}/{FILES[1]}")
        try:
            return cls(raw.decode("utf-8"), named, f"{where}/{FILES[0]}")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where}/{FILES[0]} is no text in UTF-8 ({error}); repair it"
            ) from error

    def render(self, chat: Chat, variables: Mapping[str, Any], prompts: bool) -> str:
        """The text of a conversation.

        `prompts` says whether the beginning of the model's turn follows. Of `variables`,
        `chat_date` ("2026-11-23") is the day that the template may ask for, and `tools` the tools'
        definitions; all others are the template's own.
        Raises `UserError` when the template fails.
        """
        own: dict[str, Any] = {"tools": None, **variables}
        date = own.pop("chat_date", None)
        if date is not None:
            own["strftime_now"] = datetime.date.fromisoformat(date).strftime
        try:
            with limited():
                return self._template.render(
                    messages=[dict(message) for message in chat],
                    add_generation_prompt=prompts,
                    documents=None,
                    **self.tokens,
                    **own,
                )
        except Exception as error:  # a template may fail in any way
            raise UserError(self._failure(chat, error)) from error

    def _failure(self, chat: Chat, error: Exception) -> str:
        roles = ", ".join(message["role"] for message in chat)
        text = (
            f"{self.where}: the chat template fails on messages of the roles {roles} "
            f"({_described(error)}); "
        )
        if "strftime_now" in str(error):
            return text + "it asks for today's date: give the environment the option chat_date"
        if chat and chat[0]["role"] == "system":
            return text + (
                "if it knows no system role, write the option system_prompt into the prompts; else "
                "repair the template"
            )
        return text + "repair the template, or give it the roles that it knows"


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


def _config(raw: bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no JSON ({error}); use the checkpoint's own file") from error
    if not isinstance(found, dict):
        raise UserError(f"{where} holds no JSON object; use the checkpoint's own file")
    return found


def _text_of(token: Any) -> str | None:
    """A token in tokenizer_config.json: text, or an object with its text as `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _default(found: Any) -> str | None:
    """A template in tokenizer_config.json: text, or a list with one named `default`."""
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
