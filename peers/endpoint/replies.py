"""Replies in the forms of OpenAI: whole ones, and the events of a stream."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from peers.endpoint.tools import Call
from peers.environments.renderer import Renderer


@dataclass(frozen=True)
class Delta:
    """What is new of a choice, or all of a finished one."""

    index: int
    text: str
    tokens: Sequence[int]
    log_probabilities: Sequence[float]
    finish: str | None
    calls: Sequence[Call] = ()
    """Calls of tools after the text, in the last delta of a chat."""


@dataclass(frozen=True)
class Reply:
    """What all forms of one request's reply have in common."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    renderer: Renderer | None = None
    """Needed for log-probabilities."""
    prompt_tokens: int | None = None
    """None: unknown, so that the reply has no usage."""
    wants_log_probabilities: bool = False

    def usage(self, completion_tokens: int) -> dict[str, int] | None:
        if self.prompt_tokens is None:
            return None
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Each token's own text; a token that is part of a character has none of its own."""
        assert self.renderer is not None
        return [self.renderer.decode_completion([token], ())[0] for token in tokens]


Event = dict[str, Any]
"""One event of a stream."""


class Form(Protocol):
    """How a reply is written: whole, or as the events of a stream."""

    def whole(self, reply: Reply, choices: Sequence[Delta]) -> dict[str, Any]: ...

    def opening(self, reply: Reply, index: int) -> list[Event]:
        """The first events of a choice."""
        ...

    def event(self, reply: Reply, delta: Delta) -> list[Event]: ...

    def closing(self, reply: Reply, completion_tokens: int) -> list[Event]:
        """The last events, if the client wants to know the usage."""
        ...


class CompletionForm:
    """`/v1/completions`."""

    kind = "text_completion"

    def whole(self, reply: Reply, choices: Sequence[Delta]) -> dict[str, Any]:
        made = [self._choice(reply, choice) for choice in choices]
        return {**reply.head(self.kind), "choices": made, "usage": reply.usage(_tokens(choices))}

    def opening(self, reply: Reply, index: int) -> list[Event]:
        return []

    def event(self, reply: Reply, delta: Delta) -> list[Event]:
        return [{**reply.head(self.kind), "choices": [self._choice(reply, delta)]}]

    def closing(self, reply: Reply, completion_tokens: int) -> list[Event]:
        return [{**reply.head(self.kind), "choices": [], "usage": reply.usage(completion_tokens)}]

    def _choice(self, reply: Reply, delta: Delta) -> dict[str, Any]:
        log_probabilities = None
        if reply.wants_log_probabilities:
            texts = reply.token_texts(delta.tokens)
            log_probabilities = {
                "tokens": texts,
                "token_logprobs": _finite(delta.log_probabilities),
                "top_logprobs": None,
                "text_offset": [sum(map(len, texts[:at])) for at in range(len(texts))],
            }
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": log_probabilities,
            "finish_reason": delta.finish,
        }


class ChatForm:
    """`/v1/chat/completions`."""

    def whole(self, reply: Reply, choices: Sequence[Delta]) -> dict[str, Any]:
        made = []
        for delta in choices:
            message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
            if delta.calls:
                message |= {"content": delta.text or None, "tool_calls": _calls(delta)}
            made.append({**self._choice(reply, delta), "message": message})
        head = reply.head("chat.completion")
        return {**head, "choices": made, "usage": reply.usage(_tokens(choices))}

    def opening(self, reply: Reply, index: int) -> list[Event]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [{**reply.head("chat.completion.chunk"), "choices": [choice]}]

    def event(self, reply: Reply, delta: Delta) -> list[Event]:
        new: dict[str, Any] = {"content": delta.text} if delta.text or not delta.finish else {}
        if delta.calls:
            new["tool_calls"] = [
                {"index": index, **call} for index, call in enumerate(_calls(delta))
            ]
        choice = {**self._choice(reply, delta), "delta": new}
        return [{**reply.head("chat.completion.chunk"), "choices": [choice]}]

    def closing(self, reply: Reply, completion_tokens: int) -> list[Event]:
        head = reply.head("chat.completion.chunk")
        return [{**head, "choices": [], "usage": reply.usage(completion_tokens)}]

    def _choice(self, reply: Reply, delta: Delta) -> dict[str, Any]:
        known = None
        if reply.wants_log_probabilities:
            known = {"content": log_probabilities(delta, reply), "refusal": None}
        return {
            "index": delta.index,
            "logprobs": known,
            "finish_reason": "tool_calls" if delta.calls else delta.finish,
        }


def encode(body: dict[str, Any]) -> bytes:
    """A reply's JSON."""
    return msgspec.json.encode(body)


def as_event(body: Event) -> bytes:
    """One server-sent event; those of responses have a type."""
    kind = f"event: {body['type']}\n" if "type" in body else ""
    return kind.encode() + b"data: " + encode(body) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"


def _tokens(choices: Sequence[Delta]) -> int:
    return sum(len(choice.tokens) for choice in choices)


def _calls(delta: Delta) -> list[dict[str, Any]]:
    """Calls as a client of chats gets them."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in delta.calls
    ]


def log_probabilities(delta: Delta, reply: Reply) -> list[dict[str, Any]]:
    """Those of the sampled tokens, as chats and responses have them."""
    pairs = zip(reply.token_texts(delta.tokens), _finite(delta.log_probabilities), strict=True)
    return [
        {"token": text, "logprob": value, "bytes": [*text.encode()], "top_logprobs": []}
        for text, value in pairs
    ]


def _finite(values: Sequence[float]) -> list[float]:
    """JSON has no infinity; vLLM writes -9999."""
    return [value if math.isfinite(value) else -9999.0 for value in values]
