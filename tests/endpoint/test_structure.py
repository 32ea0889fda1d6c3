"""Replies that follow a schema, or must call a tool: served, and no rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from peers.endpoint.structure import texts_of
from peers.engines.engine import Piece, Request
from peers.engines.registry import make_engine
from tests.endpoint.harness import serving
from tests.endpoint.test_responses import folder  # noqa: F401 (a fixture)
from tests.endpoint.test_tools import TOOL

RUNNER = trio.run

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "tame": {"type": "boolean"}},
    "required": ["animal", "tame"],
}


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}


async def test_a_reply_follows_a_schema_and_is_no_rollout(folder: Path) -> None:  # noqa: F811
    async with serving(folder) as client:
        asked = {"messages": [USER], "user": "a", "n": 4, "response_format": format_of(SCHEMA)}
        choices = (await client.ok(CHAT, asked))["choices"]
        for choice in choices:
            found = json.loads(choice["message"]["content"])
            assert found["animal"] in ("cat", "dog") and isinstance(found["tame"], bool)
            assert choice["finish_reason"] == "stop"
        session = client.endpoint.sessions.find("a")
        assert session.rollouts() == []
        asked |= {"messages": [USER, choices[0]["message"], USER], "max_tokens": 3}
        del asked["response_format"], asked["n"]
        await client.ok(CHAT, asked)
        ((episode, rollout),) = session.rollouts()
        assert list(rollout.prompt[: len(session.episodes[0].tokens)]) == session.episodes[0].tokens
        assert 1 <= len(rollout.model_tokens) <= 3 and not episode.is_structured
        response = {"input": "hi", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        (item,) = (await client.ok("/v1/responses", response))["output"]
        assert "animal" in json.loads(item["content"][0]["text"])


async def test_a_tool_is_called_if_it_must_be(folder: Path) -> None:  # noqa: F811
    function = {"name": "choose", "parameters": SCHEMA}
    tools = [TOOL, {"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "choose"}}
    async with serving(folder) as client:
        asked = {"messages": [USER], "tools": tools, "tool_choice": named}
        choice = (await client.ok(CHAT, asked))["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "choose" and choice["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"])["animal"] in ("cat", "dog")
        status, found = await client.post(CHAT, asked | {"tool_choice": "any"})
        assert status == 400 and 'send "auto", "none", "required"' in found["error"]["message"]


async def test_schemas_that_cannot_be_followed_are_sentences(folder: Path) -> None:  # noqa: F811
    async with serving(folder) as client:
        for schema, words in (
            ({"$ref": "#/nowhere"}, "the schema cannot be followed"),
            ({"type": "string", "pattern": "(a|b){1000}{1000}{1000}"}, "cannot be followed"),
            ({"enum": ["a" * (1 << 16)]}, "more than 65536 bytes"),
        ):
            body = {"messages": [USER], "response_format": format_of(schema)}
            status, found = await client.post(CHAT, body)
            assert status == 400 and words in found["error"]["message"], found
        client.endpoint.policy.capabilities.__dict__["masks"] = False
        body = {"messages": [USER], "response_format": {"type": "json_object"}}
        status, found = await client.post(CHAT, body)
        assert (
            status == 400 and "engine native cannot keep to a schema" in found["error"]["message"]
        )


class Digits:
    """A mask that leaves ten tokens."""

    def allowed(self, tokens: Any) -> list[int]:
        return list(range(10, 20))


@pytest.mark.parametrize("key", [(1, 2), None])
def test_a_mask_binds_its_own_request_only(folder: Path, key: Any) -> None:  # noqa: F811
    """Whatever the temperature, and with a row beside it that is sampled as if alone."""

    def tokens_of(*masks: Any) -> list[list[int]]:
        engine = make_engine("native", folder)
        for index, mask in enumerate(masks):
            engine.submit(Request(index, [1, 4, 5], 0, key, 1.5, (2,), 20, mask=mask))
        found: dict[int, Piece] = {}
        while len(found) < len(masks):
            found |= {piece.id: piece for piece in engine.step()}
        assert all(torch.isfinite(each.log_probabilities).all() for each in found.values())
        return [found[index].tokens for index in range(len(masks))]

    masked, free = tokens_of(Digits(), None)
    assert set(masked) <= set(Digits().allowed(())) and len(masked) == 20
    assert [free] == tokens_of(None) and free != masked


def test_texts_of_tokens_are_bytes() -> None:
    model = {"type": "BPE", "vocab": {"\u0120a": 0, "\u00c3": 1, "</s>": 2}, "merges": []}
    added = {"id": 2, "content": "</s>", "special": True, "single_word": False, "lstrip": False}
    added |= {"rstrip": False, "normalized": False}
    form: dict[str, Any] = {"model": model, "added_tokens": [added], "version": "1.0"}
    form |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    in_bytes = json.dumps(form | {"pre_tokenizer": levels | {"use_regex": True}})
    assert texts_of(in_bytes, 2) == {b" a": [0], b"\xc3": [1]}
    model["vocab"] = {"\u2581a": 0, "<0xC3>": 1, "</s>": 2}
    assert texts_of(json.dumps(form | {"pre_tokenizer": None}), 2) == {b" a": [0], b"\xc3": [1]}
