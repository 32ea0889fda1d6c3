"""Messages as token ids: prompts, and what follows a turn of the model.

The model's tokens are never decoded and encoded again. What the template writes after a turn is the
text that follows a stand-in for the turn; its tokens are appended to those of the model.

Control tokens come from the template only. A message that contains the text of one, such as
`<|im_end|>`, gets the tokens of that text: before rendering, codes of
noncharacters replace such texts; afterwards other codes replace the control tokens of the template,
and the former become text again. A second copy of the tokenizer treats control tokens as text and
knows the codes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from blake3 import blake3

from peers.environments.chat_template import ChatTemplate
from peers.environments.interface import Message
from swarm.errors import UserError

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
        """Ids of the control tokens."""

    @classmethod
    def of_files(
        cls, files: Mapping[str, bytes], tokenizer: tokenizers.Tokenizer, where: str
    ) -> ChatTokens:
        """The template in a model folder's files (`chat_files`); `where` names the folder.

        Raises `UserError`.
        """
        template = ChatTemplate.of_files(files, where)
        if template is None:
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
        return self.encode(self.text(messages, variables))

    def text(
        self, messages: Sequence[Message], variables: Mapping[str, Any], begun: str | None = None
    ) -> str:
        """The text of a prompt, which `encode` turns into its tokens; raises `UserError`.

        It has codes for control tokens. `begun`: text with which the model's turn begins already.
        """
        if begun is None:
            return self._rendered(_chat(messages), variables, prompts=True)
        before, _ = self._around_turn(_chat(messages), variables, ())
        return before + self._quote(NONCHARACTERS.sub("\ufffd", begun))

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
        the run is created (`peers.environments.chat_checks`). Raises `UserError`.
        """
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
        """The text of a control token."""
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
    """A JSON value with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(each, change) for each in value]
    return value
