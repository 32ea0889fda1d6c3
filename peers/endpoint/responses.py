"""OpenAI's responses: the same chats in another form, which `openai-agents` and others speak."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from peers.endpoint import requests
from peers.endpoint.errors import ApiError
from peers.endpoint.replies import Delta, Event, Reply, log_probabilities

LOG_PROBABILITIES = "message.output_text.logprobs"
"""The value of `include` that asks for them."""


def as_chat(asked: requests.ResponsesRequest) -> requests.ChatRequest:
    """The request in the form of a chat; raises `ApiError`."""
    return requests.ChatRequest(
        messages=list(_messages(asked)),
        model=asked.model,
        max_completion_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        logprobs=LOG_PROBABILITIES in (asked.include or ()),
        tools=[_tool(each) for each in asked.tools or []] or None,
        tool_choice=_choice(asked.tool_choice),
        response_format=asked.text.format if asked.text is not None else None,
        stream=asked.stream,
        user=asked.user,
    )


def _messages(asked: requests.ResponsesRequest) -> Iterator[requests.ChatMessage]:
    if asked.instructions:
        yield requests.ChatMessage("system", asked.instructions)
    if isinstance(asked.input, str):
        yield requests.ChatMessage("user", asked.input)
        return
    turn: requests.ChatMessage | None = None
    """The model's: its text, then its calls."""
    for item in asked.input:
        is_call = item.type == "function_call"
        if turn is not None and not is_call:
            yield turn
            turn = None
        if is_call:
            turn = turn or requests.ChatMessage("assistant", "")
            turn.tool_calls = [
                *(turn.tool_calls or []),
                requests.ToolCall(requests.CalledFunction(item.name, item.arguments), item.call_id),
            ]
        elif item.type == "function_call_output":
            yield requests.ChatMessage("tool", item.output, tool_call_id=item.call_id)
        elif item.role == "assistant":
            turn = requests.ChatMessage("assistant", item.content)
        else:
            yield requests.ChatMessage(item.role, item.content)
    if turn is not None:
        yield turn


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    """A tool's definition in the form of chats; raises `ApiError` for one of OpenAI's own."""
    if given.get("type") != "function":
        raise ApiError(
            f"a tool of the type {str(given.get('type'))[:60]!r} is OpenAI's own; send functions",
            param="tools",
            code="unsupported_parameter",
        )
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: given[key] for key in kept if key in given}}


def _choice(given: Any) -> Any:
    is_named = isinstance(given, dict) and "name" in given
    return {"type": "function", "function": {"name": given["name"]}} if is_named else given


@dataclass
class ResponsesForm:
    """`/v1/responses`: the reply to one request. It has one choice."""

    asked: requests.ResponsesRequest
    _number: int = 0
    """Events so far."""
    _text: str = ""
    _tokens: int = 0
    _log_probabilities: list[dict[str, Any]] = field(default_factory=list)
    _id: str = field(default_factory=lambda: f"msg_{token_hex(12)}")

    def whole(self, reply: Reply, choices: Sequence[Delta]) -> dict[str, Any]:
        self._add(reply, choices[0])
        return self._response(reply, choices[0])

    def opening(self, reply: Reply, index: int) -> list[Event]:
        return [self._event("created", response=self._response(reply, None))]

    def event(self, reply: Reply, delta: Delta) -> list[Event]:
        at = {"item_id": self._id, "output_index": 0, "content_index": 0}
        events, is_first = [], not self._text
        if delta.text and is_first:
            item = self._message("in_progress") | {"content": []}
            events = [
                self._event("output_item.added", output_index=0, item=item),
                self._event("content_part.added", **at, part=self._part()),
            ]
        new = self._add(reply, delta)
        if delta.text:
            events.append(self._event("output_text.delta", **at, delta=delta.text, logprobs=new))
        if delta.finish is None:
            return events
        for index, item in enumerate(self._items(delta)):
            if item["type"] == "function_call":
                told, of = item["arguments"], {"item_id": item["id"], "output_index": index}
                begun = item | {"arguments": "", "status": "in_progress"}
                events += [
                    self._event("output_item.added", output_index=index, item=begun),
                    self._event("function_call_arguments.delta", **of, delta=told),
                    self._event("function_call_arguments.done", **of, arguments=told),
                ]
            elif self._text:
                part = self._part()
                done = {"text": self._text, "logprobs": part["logprobs"]}
                events += [
                    self._event("output_text.done", **at, **done),
                    self._event("content_part.done", **at, part=part),
                ]
            else:
                events.append(self._event("output_item.added", output_index=index, item=item))
            events.append(self._event("output_item.done", output_index=index, item=item))
        response = self._response(reply, delta)
        return [*events, self._event(response["status"], response=response)]

    def closing(self, reply: Reply, completion_tokens: int) -> list[Event]:
        return []

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _add(self, reply: Reply, delta: Delta) -> list[dict[str, Any]]:
        """Note what is new; returns its log-probabilities if they are wanted."""
        self._text += delta.text
        self._tokens += len(delta.tokens)
        new = log_probabilities(delta, reply) if reply.wants_log_probabilities else []
        self._log_probabilities += new
        return new

    def _part(self) -> dict[str, Any]:
        known = {"annotations": [], "logprobs": list(self._log_probabilities)}
        return {"type": "output_text", "text": self._text, **known}

    def _message(self, status: str) -> dict[str, Any]:
        item = {"id": self._id, "type": "message", "role": "assistant", "status": status}
        return item | {"content": [self._part()]}

    def _items(self, delta: Delta) -> list[dict[str, Any]]:
        """The finished output: a message, unless there are calls alone, and the calls."""
        status = "incomplete" if delta.finish == "length" else "completed"
        items = [self._message(status)] if self._text or not delta.calls else []
        for call in delta.calls:
            item = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id}
            items.append(item | {"name": call.name, "arguments": call.arguments, "status": status})
        return items

    def _response(self, reply: Reply, delta: Delta | None) -> dict[str, Any]:
        asked, was_cut = self.asked, delta is not None and delta.finish == "length"
        status = "in_progress" if delta is None else "incomplete" if was_cut else "completed"
        used = None if delta is None else reply.usage(self._tokens)
        usage = None if used is None else _usage(used)
        return {
            "id": reply.id,
            "object": "response",
            "created_at": reply.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
            "instructions": asked.instructions,
            "metadata": {},
            "model": reply.model,
            "output": [] if delta is None else self._items(delta),
            "parallel_tool_calls": True,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": 1.0,
            "usage": usage,
        }


def _usage(used: dict[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used["total_tokens"],
    }
