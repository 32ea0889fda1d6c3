"""Responses, which are chats in another form; sessions by path; figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from peers.engines.demo import make_policy
from tests.endpoint.harness import serving
from tests.endpoint.test_tools import CALLING, HERMES, TOOL, scripted

RUNNER = trio.run

PATH = "/v1/responses"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("responses") / "tiny"
    make_policy(path, positions=512)
    (path / "chat_template.jinja").write_text(HERMES)
    return path


async def test_a_response_says_what_a_chat_says(folder: Path) -> None:
    async with serving(folder) as client:
        asked = {"input": "1 + 1?", "instructions": "add.", "temperature": 0}
        asked |= {"max_output_tokens": 9, "include": ["message.output_text.logprobs"]}
        messages = [{"role": "developer", "content": "add."}, {"role": "user", "content": "1 + 1?"}]
        chat = {"messages": messages, "max_tokens": 9, "temperature": 0, "logprobs": True}
        said = (await client.ok("/v1/chat/completions", chat))["choices"][0]
        whole = await client.ok(PATH, asked)
        (item,) = whole["output"]
        (part,) = item["content"]
        assert part["text"] == said["message"]["content"]
        values = [each["logprob"] for each in said["logprobs"]["content"]]
        assert [each["logprob"] for each in part["logprobs"]] == pytest.approx(values, abs=1e-4)
        assert (whole["status"], item["status"]) == ("incomplete", "incomplete")
        assert whole["usage"]["output_tokens"] == 9
        events = await client.events(PATH, asked | {"stream": True})
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        deltas = [each["delta"] for each in events if each["type"].endswith("text.delta")]
        assert "".join(deltas) == part["text"] and len(deltas) == 2
        last = events[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["output"][0]["content"][0]["text"] == part["text"]
        assert last["response"]["usage"] == whole["usage"]


async def test_calls_of_a_response_go_on_with_the_tokens_that_were_sampled(folder: Path) -> None:
    function: Any = TOOL["function"]
    tool = {"type": "function", **function}
    async with scripted(folder, CALLING, CALLING, "2.") as (client, engine):
        user: dict[str, Any] = {"role": "user", "content": [{"type": "input_text", "text": "1?"}]}
        asked: dict[str, Any] = {"input": [user], "tools": [tool]}
        events = await client.events(PATH, asked | {"stream": True, "user": "streamed"})
        asked["user"] = "a"
        output = (await client.ok(PATH, asked))["output"]
        streamed = events[-1]["response"]["output"]
        shown = [(item["type"], item.get("name"), item.get("arguments")) for item in output]
        assert shown == [("message", None, None), ("function_call", "add", '{"a": 1}')]
        assert shown == [
            (item["type"], item.get("name"), item.get("arguments")) for item in streamed
        ]
        kinds = [each["type"].removeprefix("response.") for each in events]
        assert kinds.count("output_item.added") == kinds.count("output_item.done") == 2
        result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "2"}
        asked["input"] = [user, *output, result]
        again = await client.ok(PATH, asked)
        assert again["output"][0]["content"][0]["text"] == "2." and again["status"] == "completed"
        _, first, second = engine.prompts
        written = client.endpoint.policy.renderer.encode_completion(CALLING)
        assert list(second[: len(first) + len(written) + 1]) == [*first, *written, 2]


async def test_what_a_response_cannot_be_is_a_sentence(folder: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"previous_response_id": "resp_1"}, "no conversation is kept; send all of it"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is OpenAI's own; send functions"),
        ({"input": [{"type": "reasoning"}]}, "Invalid enum value 'reasoning'"),
        ({"truncation": "auto"}, "nothing is left out of a prompt"),
        ({"text": {"format": {"type": "json_schema"}}}, "the format has no schema"),
        ({"input": []}, "length >= 1"),
        ({"seed": 1}, "is unknown"),
    ]
    async with serving(folder) as client:
        for body, sentence in cases:
            status, found = await client.post(PATH, {"input": "a", **body})
            assert status == 400 and sentence in found["error"]["message"], found


async def test_a_path_names_the_session_and_figures_are_counted(
    folder: Path, tmp_path: Path
) -> None:
    async with serving(folder, record=tmp_path) as client:
        body = {"input": "a", "max_output_tokens": 3}
        await client.ok("/sessions/agent-1/v1/responses", body)
        assert [each.name for each in client.endpoint.sessions.all()] == ["agent-1"]
        text = (await client.http.get("/metrics")).text
        assert "# TYPE swarm_endpoint_sessions_open gauge\nswarm_endpoint_sessions_open 1\n" in text
        assert "swarm_endpoint_choices_total 1\n" in text
        assert "swarm_endpoint_generated_tokens_total 3\n" in text
        await client.ok("/sessions/agent-1/v1/rollouts/agent-1/reward", {"reward": 1})
        status, _ = await client.post("/sessions/a b/v1/responses", body)
        assert status == 404
