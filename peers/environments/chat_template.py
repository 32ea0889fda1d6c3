"""A checkpoint's chat template: the Jinja text that turns messages into a prompt.

The templates are rendered by Jinja's sandbox with the settings of transformers, in a killable
process (`peers.environments.template_service`). Unlike there, the date is not that of the day,
because a prompt must be the same on every machine."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import tokenizers
from blake3 import blake3

from peers.environments.graders.pool import OutOfMemory, OutOfTime, Pool, ServiceError
from peers.environments.interface import Message
from peers.environments.renderer import FILES
from swarm.errors import UserError

CHARACTERS_MAX = 1 << 17
"""Size of a template; the longest in use have 20,000."""

CPU_SECONDS = 10.0
"""CPU time of one rendering: the longest chats take a hundredth of it. Whether a task has a prompt
must not depend on the machine, so only templates that compute without end may reach it."""

WALL_SECONDS = 600.0
"""Wall time of one rendering. A machine so busy fails; it does not pass over the task."""

MEMORY_BYTES = 512 << 20
"""Memory of the process beyond its libraries."""

_BEYOND = (ServiceError, OutOfTime, OutOfMemory)
"""What a template does on every machine alike."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
"""Tokens that a template may use as variables, by their keys in the tokenizer's files."""

Chat = Sequence[Mapping[str, Any]]
"""Messages, each with `role` and `content`, and perhaps with calls of tools."""


@cache
def _pool() -> Pool:
    service = "peers.environments.template_service:TemplateService"
    return Pool(service, WALL_SECONDS, MEMORY_BYTES, CPU_SECONDS)


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
            self._ask(None)
        except _BEYOND as error:
            raise UserError(
                f"{where}: the chat template is no valid Jinja ({error!s:.200}); repair it"
            ) from error

    @classmethod
    def of_files(cls, files: Mapping[str, bytes], where: str) -> "ChatTemplate | None":
        """The template in the `FILES` of the model folder `where`, or None; raises `UserError`."""
        config = _config(files.get(FILES[1], b"{}"), f"{where}/{FILES[1]}")
        mapped = _config(files.get(FILES[2], b"{}"), f"{where}/{FILES[2]}")
        tokens = {
            name: _text_of(config.get(name)) or _text_of(mapped.get(name)) for name in NAMED_TOKENS
        }
        named = {name: text for name, text in tokens.items() if text is not None}
        if (raw := files.get(FILES[0])) is None:
            source = _default(config.get("chat_template"))
            return None if source is None else cls(source, named, f"{where}/{FILES[1]}")
        try:
            return cls(raw.decode("utf-8"), named, f"{where}/{FILES[0]}")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where}/{FILES[0]} is no text in UTF-8 ({error}); repair it"
            ) from error

    def render(self, chat: Chat, variables: Mapping[str, Any], prompts: bool) -> str:
        """The text of a conversation, if `prompts` with the beginning of the model's turn.

        Of `variables`, `chat_date` ("2026-11-23") is the day that the template may ask for, and
        `tools` the tools' definitions. Raises `UserError` when the template fails."""
        given = {
            "messages": [dict(message) for message in chat],
            "add_generation_prompt": prompts,
            "documents": None,
            "tools": None,
            **self.tokens,
            **variables,
        }
        try:
            return str(json.loads(self._ask(given)))
        except _BEYOND as error:
            raise UserError(self._failure(chat, error)) from error

    def _ask(self, given: Mapping[str, Any] | None) -> str:
        return str(_pool().ask(json.dumps({"source": self.source, "given": given})))

    def _failure(self, chat: Chat, error: Exception) -> str:
        roles = ", ".join(message["role"] for message in chat)
        text = (
            f"{self.where}: the chat template fails on messages of the roles {roles} "
            f"({error!s:.200}); "
        )
        if "strftime_now" in str(error):
            return text + "it asks for today's date: give the environment the option chat_date"
        if chat and chat[0]["role"] == "system":
            return text + (
                "if it knows no system role, write the option system_prompt into the prompts; else "
                "repair the template"
            )
        return text + "repair the template, or give it the roles that it knows"


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


# Messages as token ids: prompts, and what follows a turn of the model.
#
# The model's tokens are never decoded and encoded again. What the template writes after a turn is
# the text that follows a stand-in for the turn; its tokens are appended to those of the model.
#
# Control tokens come from the template only. A message that contains the text of one, such as
# `<|im_end|>`, gets the tokens of that text: before rendering, codes of noncharacters replace such
# texts; afterwards other codes replace the control tokens of the template, and the former become
# text again. A second copy of the tokenizer treats control tokens as text and knows the codes.

NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
"""Unicode reserves them for use inside a program. In messages they become U+FFFD."""

TURN = "\ufdd0"
"""Stands for a turn of the model."""

CONTROL = "\ufdd1{}\ufdd2"
"""Stands for a control token, by its id, that the template writes."""

QUOTED = "\ufdd3{}\ufdd4"
"""Stands for the text of a control token, by its id, in a message."""


class ChatTokens:
    """A checkpoint's chat template with its tokenizer."""

    def __init__(self, template: ChatTemplate, tokenizer: tokenizers.Tokenizer) -> None:
        """Take over `tokenizer`, which must not be used for anything else."""
        self.template = template
        specials = {
            token.content: (id, token)
            for id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        self._controls = {text: id for text, (id, _) in specials.items()}
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._quoted = re.compile(QUOTED.format(r"(\d+)"))
        codes = [
            tokenizers.AddedToken(
                CONTROL.format(id), lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
            )
            for id, token in specials.values()
        ]
        tokenizer.add_tokens(codes)
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._texts = {str(id): text for text, id in self._controls.items()}
        self._ids = {tokenizer.token_to_id(CONTROL.format(id)): id for id, _ in specials.values()}
        self.control_ids = frozenset(self._controls.values())

    @classmethod
    def of_files(
        cls, files: Mapping[str, bytes], tokenizer: tokenizers.Tokenizer, where: str
    ) -> "ChatTokens":
        """The template in the files of the model folder `where`; raises `UserError`."""
        if (template := ChatTemplate.of_files(files, where)) is None:
            raise UserError(
                f"{where} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json), which prompts of messages need; use a checkpoint that has "
                "one, or add the file"
            )
        return cls(template, tokenizers.Tokenizer.from_str(tokenizer.to_str()))

    def fingerprint(self) -> bytes:
        """BLAKE3-256 of the template and of the token texts that it may use."""
        hasher = blake3(self.template.source.encode())
        for name, text in sorted(self.template.tokens.items()):
            hasher.update(f"\0{name}\0{text}".encode())
        return hasher.digest()

    def prompt(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[int]:
        """Token ids of a prompt, with the beginning of the model's turn; raises `UserError`."""
        return self.encode(self._rendered(_chat(messages), variables, prompts=True))

    def after_turn(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        observation: Sequence[Message],
        last: int | None,
    ) -> list[int]:
        """Token ids that follow a turn of the model in the conversation that began with `messages`.

        They end the turn, unless `last`, the model's last token, has ended it; then follow the
        observation and the beginning of the model's next turn. Without an observation they only end
        the turn. Earlier turns play no part: a template that looks back at them is refused when
        the run is created (`peers.environments.run_probe`). Raises `UserError`."""
        _, after = self._around_turn(_chat(messages), variables, _chat(observation))
        tokens = self.encode(after)
        return tokens[self._written_by_model(tokens, last) :]

    def closing_token(
        self, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> int | None:
        """The control token with which the template ends a turn, or None if it ends with text."""
        tokens = self.after_turn(messages, variables, (), None)
        return next((token for token in tokens if token in self.control_ids), None)

    def text_of(self, token: int) -> str:
        return self._texts[str(token)]

    def _written_by_model(self, tokens: Sequence[int], last: int | None) -> int:
        """How many of the tokens after a turn the model's last token has made superfluous."""
        if last not in tokens:
            return 0
        at = tokens.index(last)
        between = self._tokenizer.decode(list(tokens[:at]), skip_special_tokens=False)
        return 0 if between.strip() else at + 1

    def _around_turn(
        self,
        chat: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        observation: Sequence[Mapping[str, Any]],
    ) -> tuple[str, str]:
        """The text before a turn of the model that follows `chat`, and the text after it."""
        turns = [*chat, {"role": "assistant", "content": TURN}, *observation]
        text = self._rendered(turns, variables, prompts=bool(observation))
        if text.count(TURN) != 1:
            raise UserError(
                f"{self.template.where}: the chat template writes a turn of the model "
                f"{text.count(TURN)} times instead of once, so that no tokens can follow it; "
                "repair the template"
            )
        before, _, after = text.partition(TURN)
        return before, after

    def _rendered(
        self, chat: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], prompts: bool
    ) -> str:
        """The text with codes for the control tokens of the template."""
        given = {**variables}
        if "tools" in given:
            given["tools"] = _mapped(given["tools"], self._quote)
        text = self.template.render(_mapped(chat, self._quote), given, prompts)
        return self._control.sub(self._code(CONTROL), text)

    def _quote(self, text: str) -> str:
        """A message's text with codes for the texts of control tokens."""
        return self._control.sub(self._code(QUOTED), text)

    def _code(self, form: str) -> Any:
        return lambda found: form.format(self._controls[found.group()])

    def encode(self, text: str) -> list[int]:
        """Token ids of a text with codes for control tokens."""
        plain = self._quoted.sub(lambda found: self._texts[found.group(1)], text)
        ids = self._tokenizer.encode(plain, add_special_tokens=False).ids
        return [self._ids.get(id, id) for id in ids]


def _chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [
        _mapped(each.fields(), lambda text: NONCHARACTERS.sub("\ufffd", text)) for each in messages
    ]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(each, change) for each in value]
    return value
