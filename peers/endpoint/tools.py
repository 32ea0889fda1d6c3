"""Tool calls: how a checkpoint's chat template writes them, and how they are read from a text.

The form is learned from the template itself: it renders a call with known words, and what stands
around them is what the model was taught to write. Forms in JSON are understood, such as
`<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen), a list after `[TOOL_CALLS]`
(Mistral), and a bare object (Llama)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any, Literal

import msgspec

from peers.endpoint.errors import ApiError
from peers.endpoint.requests import CALLS_MAX, ChatMessage, ChatRequest, ToolName
from peers.environments.chat_template import ChatTemplate
from peers.environments.interface import Message, ToolMessage
from swarm.errors import UserError
from swarm.rollouts.rollout import Finish

NAME, KEY, VALUE = "stand_in_tool", "stand_in_key", "stand_in_value"
"""Words of the call that a template renders to show its form."""

STAND_IN = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}},
    },
}
CALL_ID = "call00000"
"""Nine letters and digits, as Mistral's templates want them."""

_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object."""
    id: str = field(default_factory=lambda: token_hex(5)[:9], compare=False)
    """Nine letters and digits, which all templates take."""


@dataclass(frozen=True)
class CallForm:
    """How calls are written."""

    opening: str
    """What stands before the JSON; empty: the JSON is the whole text."""
    closing: str
    name: str
    """The key of a tool's name."""
    arguments: str
    """The key of its arguments."""

    def read(self, text: str) -> tuple[str, tuple[Call, ...]]:
        """(the text before the calls, the calls); a text that is not in this form has none."""
        begins = text.find(self.opening) if self.opening else 0
        if begins < 0:
            return text, ()
        calls: list[Call] = []
        at = begins
        while (at := _skip(text, at)) < len(text):
            if len(calls) > CALLS_MAX:
                return text, ()
            if not text.startswith(self.opening, at):
                return text, ()
            found = self._value(text, _skip(text, at + len(self.opening)))
            if found is None:
                return text, ()
            more, at = found
            calls += more
            if self.closing:
                at = _skip(text, at)
                if not text.startswith(self.closing, at):
                    return text, ()
                at += len(self.closing)
            elif not self.opening and text.startswith(";", _skip(text, at)):
                at = _skip(text, at) + 1  # Llama's separator
        if not 1 <= len(calls) <= CALLS_MAX:
            return text, ()
        return text[:begins], tuple(calls)

    def written(self, function: Mapping[str, Any]) -> tuple[str, str, str]:
        """(text before, schema, text after) of a call of a tool, given its definition."""
        call = {
            "type": "object",
            "properties": {
                self.name: {"const": function["name"]},
                self.arguments: function.get("parameters") or {"type": "object"},
            },
            "required": [self.name, self.arguments],
        }
        return self.opening, json.dumps(call), self.closing

    def certain(self, text: str) -> int:
        """How many characters of an unfinished text are surely not part of a call."""
        if not self.opening:
            begins = text.lstrip()[:1]
            return 0 if begins in ("", "{", "[") else len(text)
        begins_at = text.find(self.opening)
        if begins_at >= 0:
            return begins_at
        for length in range(min(len(self.opening) - 1, len(text)), 0, -1):
            if text.endswith(self.opening[:length]):
                return len(text) - length
        return len(text)

    def _value(self, text: str, at: int) -> tuple[list[Call], int] | None:
        """The calls in the JSON that begins at `at`, and its end."""
        try:
            value, end = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        calls = []
        for each in value if isinstance(value, list) else [value]:
            name = each.get(self.name) if isinstance(each, dict) else None
            arguments = each.get(self.arguments) if isinstance(each, dict) else None
            if not isinstance(name, str) or not name or not isinstance(arguments, dict):
                return None
            calls.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
        return calls, end


FORMS = {
    "hermes": CallForm("<tool_call>", "</tool_call>", "name", "arguments"),
    "mistral": CallForm("[TOOL_CALLS]", "", "name", "arguments"),
    "llama": CallForm("", "", "name", "parameters"),
}
"""The forms in use, for a program that has no template to learn them from."""


def form_of(template: ChatTemplate) -> CallForm:
    """The form in which a template writes calls; raises `UserError` if it has none."""
    asked = Message("user", "stand_in_question").fields()
    tools = {"tools": [STAND_IN]}
    called = _json_of([Call(NAME, _arguments())], [CALL_ID])
    begins = template.render([asked], tools, prompts=True)
    if NAME not in begins:
        raise UserError(
            f"{template.where}: the chat template has no tools; describe them in a message, and "
            "parse the text"
        )
    turn = ToolMessage("assistant", "", tool_calls=called).fields()
    return _form_in(template.render([asked, turn], tools, prompts=False), begins, template)


def check_form(template: ChatTemplate, calls: str, where: str) -> None:
    """Raise `UserError`, which begins with `where`, if a template has another form than `calls`."""
    found = form_of(template)
    if found != FORMS.get(calls):
        like = next((name for name, form in FORMS.items() if form == found), "")
        raise UserError(
            f"{where}: calls is {calls!r}, but {template.where} writes them after "
            f"{found.opening!r}; " + (f"give {like!r}" if like else "change the template")
        )


def _form_in(turn: str, begins: str, template: ChatTemplate) -> CallForm:
    shared = 0
    while shared < min(len(turn), len(begins)) and turn[shared] == begins[shared]:
        shared += 1
    text = turn[shared:]
    named = text.find(NAME)
    for at in [index for index, letter in enumerate(text[: max(0, named)]) if letter in "{["]:
        try:
            value, end = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            continue
        if end <= named:
            continue
        one = value[0] if isinstance(value, list) and value else value
        keys = (
            {json.dumps(given): key for key, given in one.items()} if isinstance(one, dict) else {}
        )
        name, arguments = keys.get(json.dumps(NAME)), keys.get(_arguments())
        if name is not None and arguments is not None:
            return CallForm(text[:at].strip(), _closing(text[end:], template), name, arguments)
    raise UserError(
        f"{template.where}: the chat template writes tool calls in another form than JSON with a "
        "name and arguments, which is not understood; describe the tools in a message, and parse "
        "the text"
    )


def _closing(rest: str, template: ChatTemplate) -> str:
    """What stands between the JSON of a call and the end of a turn."""
    chat = [Message("user", "stand_in_question"), Message("assistant", VALUE)]
    plain = template.render([each.fields() for each in chat], {}, prompts=False)
    ends = plain.rpartition(VALUE)[2].strip()
    return rest.strip().removesuffix(ends).strip() if ends else rest.strip()


# --- messages ------------------------------------------------------------------------------------


class _Function(msgspec.Struct):
    """A tool's definition; the template gets its other fields, too."""

    name: ToolName


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Function


def tools_of(asked: ChatRequest) -> str:
    """The tools of a request as JSON, empty if it has none; raises `ApiError`."""
    if not asked.tools or asked.tool_choice == "none":
        return ""
    try:
        msgspec.convert(asked.tools, list[_Tool])
    except msgspec.ValidationError as error:
        raise ApiError(f"tools: {error}", param="tools") from error
    return json.dumps(asked.tools, ensure_ascii=False)


def forced_names(asked: ChatRequest) -> frozenset[str]:
    """The tools of which one must be called, none if the model chooses; raises `ApiError`."""
    choice, names = asked.tool_choice, {tool["function"]["name"] for tool in asked.tools or []}
    if choice in (None, "auto", "none"):
        return frozenset()
    if choice == "required" and names:
        return frozenset(names)
    try:
        name = msgspec.convert(choice, _Tool).function.name
    except msgspec.ValidationError:
        name = ""
    if name not in names:
        raise ApiError(
            f'tool_choice is {str(choice)[:60]}; send "auto", "none", "required", or a function '
            "of the request's tools",
            param="tool_choice",
        )
    return frozenset([name])


def message_of(said: ChatMessage) -> Message:
    """A message of a request; raises `ApiError`."""
    role = "system" if said.role == "developer" else said.role  # templates know the older name
    if not (said.tool_calls or said.tool_call_id or said.name):
        return Message(role, said.text)
    calls = []
    for call in said.tool_calls or []:
        arguments = call.function.arguments
        try:
            is_object = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ApiError(
                f"a call of {call.function.name!r} has the arguments {arguments[:60]!r}; they must "
                "be a JSON object",
                param="messages",
            )
        calls.append(Call(call.function.name, arguments))
    ids = [call.id or CALL_ID for call in said.tool_calls or []]
    return ToolMessage(
        role,
        said.text,
        tool_calls=_json_of(calls, ids) if calls else "",
        tool_call_id=said.tool_call_id or "",
        name=said.name or "",
    )


def answer_of(text: str, finish: Finish, form: CallForm | None) -> tuple[str, tuple[Call, ...]]:
    """(content, calls) of a turn; one that the token limit cut off is a text."""
    return form.read(text) if form is not None and finish == "stop" else (text, ())


def answered(content: str, calls: Sequence[Call]) -> Message:
    """The message that a client keeps of a turn."""
    if not calls:
        return Message("assistant", content)
    return ToolMessage("assistant", content, tool_calls=_json_of(calls, [CALL_ID] * len(calls)))


def alike(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether conversations differ at most in the ids of their calls."""
    return list(map(_without_ids, one)) == list(map(_without_ids, other))


def _without_ids(message: Message) -> Message:
    if not isinstance(message, ToolMessage) or not message.tool_calls:
        return message
    functions = [call["function"] for call in json.loads(message.tool_calls)]
    return replace(message, tool_calls=json.dumps(functions, sort_keys=True))


def _json_of(calls: Sequence[Call], ids: Sequence[str]) -> str:
    made: list[dict[str, Any]] = [
        {
            "id": id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.loads(call.arguments)},
        }
        for call, id in zip(calls, ids, strict=True)
    ]
    return json.dumps(made, ensure_ascii=False)


def _arguments() -> str:
    return json.dumps({KEY: VALUE})


def _skip(text: str, at: int) -> int:
    """The index of the next character that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
