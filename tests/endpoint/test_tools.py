"""Tool calls in chats: the form that a template writes, and what clients send and get."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st

from peers.endpoint.tools import FORMS, Call, CallForm, form_of
from peers.engines.demo import make_policy
from peers.engines.engine import Engine, Piece, Request
from peers.environments.chat_template import ChatTemplate
from swarm.errors import UserError
from tests.endpoint.harness import Client, serving

RUNNER = trio.run

HERMES = """
{%- if tools %}{{- '<eos>' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<bos>user:<tool_response>\\n' + m.content + '\\n</tool_response><eos>' }}
    {%- else %}
        {{- '<bos>' + m.role + ':' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</call>' }}
        {%- endfor %}
        {{- '<eos>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<bos>assistant:' }}{% endif %}
"""
"""The form of Hermes and Qwen."""

MISTRAL = """
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id}
                | tojson }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
    {%- else %}{{ ' ' + m.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""

LLAMA = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
    {{- '<|start|>' + m.role + '<|end|>\\n\\n' }}
    {%- if m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}{{ m.content }}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}
"""

XML = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "<function={{ c.function.name }}>{% endfor %}{{ m.content }}{% endfor %}"
)

SHORT = CallForm("<call>", "</call>", "name", "arguments")


def test_the_form_of_calls_is_learned_from_the_template() -> None:
    assert form_of(ChatTemplate(HERMES, {}, "tiny")) == SHORT
    for family, source in (
        ("hermes", HERMES.replace("call>", "tool_call>")),
        ("mistral", MISTRAL),
        ("llama", LLAMA),
    ):
        assert form_of(ChatTemplate(source, {}, "tiny")) == FORMS[family]


def test_a_template_without_calls_is_a_sentence() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="tiny: the chat template has no tools; describe them in"):
        form_of(ChatTemplate(plain, {}, "tiny"))
    with pytest.raises(UserError, match="tool calls in another form than JSON with a name and"):
        form_of(ChatTemplate(XML, {}, "tiny"))


def test_calls_are_read_from_a_text() -> None:
    hermes, mistral, llama = SHORT, FORMS["mistral"], FORMS["llama"]
    one = '<call>\n{"name": "add", "arguments": {"a": 1}}\n</call>'
    add = Call("add", '{"a": 1}')
    assert hermes.read(f"So:\n{one}\n{one}") == ("So:\n", (add, add))
    assert mistral.read('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]') == ("", (add,))
    assert llama.read('{"name": "add", "parameters": {"a": 1}}') == ("", (add,))
    for text in (
        "no call",
        one + " and more",
        one.replace("</call>", ""),
        one.replace('"add"', "7"),
        one.replace('{"a": 1}', "[1]"),
        "<call>" * 100,
        one * 70,
        "<call>" + "[" * 100_000,
    ):
        assert hermes.read(text) == (text, ())
    assert llama.read("{}") == ("{}", ()) and llama.read("7") == ("7", ())


@given(st.text(alphabet="<cal>{}x", max_size=30), st.sampled_from([SHORT, FORMS["llama"]]))
def test_what_a_stream_has_sent_is_never_taken_back(text: str, form: CallForm) -> None:
    sent = ""
    for length in range(len(text) + 1):
        certain = text[: form.certain(text[:length])]
        assert certain.startswith(sent)
        sent = certain
    assert form.read(text)[0].startswith(sent)


class Scripted:
    """An engine whose requests get given texts, one after the other, instead of sampled tokens."""

    def __init__(self, engine: Engine, texts: Sequence[Sequence[int]]) -> None:
        self._engine, self._texts = engine, list(texts)
        self._requests: dict[int, Request] = {}
        self._left: list[int] = []
        self.prompts: list[Sequence[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        if not self._left:
            self._left = list(self._texts.pop(0))
            self.prompts.append(request.tokens)
        self._requests[request.id] = request

    def cancel(self, id: int) -> None:
        self._requests.pop(id, None)

    def step(self) -> list[Piece]:
        pieces = []
        for request in list(self._requests.values()):
            del self._requests[request.id]
            count = request.limit - request.start
            tokens, self._left = self._left[:count], self._left[count:]
            rows = torch.zeros(len(tokens), self._engine.capabilities.hidden_size)
            pieces.append(
                Piece(
                    id=request.id,
                    tokens=tokens,
                    log_probabilities=torch.zeros(len(tokens)),
                    hidden=rows.bfloat16(),
                    prompt_hidden=rows[:0].bfloat16(),
                    finish="length" if self._left else "stop",
                    spans=[(3, len(tokens))],
                )
            )
        return pieces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tiny"
    make_policy(path, positions=512)
    (path / "chat_template.jinja").write_text(HERMES)
    return path


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT = "/v1/chat/completions"
CALLING = 'so <call>{"name": "add", "arguments": {"a": 1}}</call>'


@asynccontextmanager
async def scripted(folder: Path, *texts: str) -> AsyncIterator[tuple[Client, Scripted]]:
    async with serving(folder) as client:
        renderer, driver = client.endpoint.policy.renderer, client.endpoint.generator.driver
        tokens = [[*renderer.encode_completion(text), 2] for text in texts]
        engine = Scripted(driver.engine, tokens)
        driver.engine = cast(Engine, engine)
        yield client, engine


async def test_a_chat_with_tools_goes_on_with_the_tokens_that_were_sampled(folder: Path) -> None:
    async with scripted(folder, CALLING, "2.") as (client, engine):
        user = {"role": "user", "content": "1 + 1?"}
        asked = {"messages": [user], "tools": [TOOL], "user": "a"}
        choice = (await client.ok(CHAT, asked))["choices"][0]
        said = choice["message"]
        assert choice["finish_reason"] == "tool_calls" and said["content"] == "so "
        call = said["tool_calls"][0]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2<eos>"}
        asked["messages"] = [user, said | {"refusal": None}, result]
        assert (await client.ok(CHAT, asked))["choices"][0]["message"]["content"] == "2."
        first, second = engine.prompts
        written = client.endpoint.policy.renderer.encode_completion(CALLING)
        assert '"name": "add"' in decoded(client, first)
        assert list(second[: len(first) + len(written) + 1]) == [*first, *written, 2]
        assert "2<eos>" in decoded(client, second[len(first) + len(written) + 1 :])
        (session,) = client.endpoint.sessions.all()
        assert len(session.episodes) == 1


def decoded(client: Client, tokens: Sequence[int]) -> str:
    return client.endpoint.policy.renderer.decode_completion(tokens, ())[0]


async def test_a_stream_gives_the_text_and_then_the_calls(folder: Path) -> None:
    async with scripted(folder, CALLING, "a <call> is no call", CALLING) as (client, _):
        asked = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "stream": True}
        for content, calls in (("so ", 1), ("a <call> is no call", 0), (CALLING, 0)):
            if not calls:
                asked |= {"tool_choice": "auto" if "no" in content else "none"}
            choices = [event["choices"][0] for event in await client.events(CHAT, asked)]
            deltas = [each["delta"] for each in choices]
            assert "".join(each.get("content") or "" for each in deltas) == content
            found = [call for each in deltas for call in each.get("tool_calls", [])]
            assert [(each["index"], each["function"]["name"]) for each in found] == [
                (0, "add")
            ] * calls
            assert choices[-1]["finish_reason"] == ("tool_calls" if calls else "stop")


async def test_tools_that_cannot_be_served_are_sentences(folder: Path, policy_folder: Path) -> None:
    user = {"role": "user", "content": "a"}
    call = {"function": {"name": "add", "arguments": "1"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [TOOL], "tool_choice": "any"}, 'send "auto", "none", "required", or a'),
        ({"tools": [{"type": "function"}]}, "missing required field `function`"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "may write several calls in a turn"),
        (
            {"messages": [user, {"role": "assistant", "tool_calls": [call]}, user]},
            "a call of 'add' has the arguments '1'; they must be a JSON object",
        ),
    ]
    async with serving(folder) as client:
        for body, sentence in cases:
            status, found = await client.post(CHAT, {"messages": [user], **body})
            assert status == 400 and sentence in found["error"]["message"], found
    async with serving(policy_folder) as client:
        status, found = await client.post(CHAT, {"messages": [user], "tools": [TOOL]})
        assert status == 400 and "the chat template has no tools" in found["error"]["message"]


FORGETFUL = (
    "{% for m in messages %}{% set text = m.content.split('</think>')[-1] if m.role == 'assistant'"
    " and messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list else m.content %}"
    "{{ '<bos>' + m.role + ':' + text + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant:' }}{% endif %}"
)
"""Removes the thoughts of turns before the user's last message, as Qwen 3's template does."""


async def test_a_thought_that_the_template_removes_begins_a_branch(tmp_path: Path) -> None:
    make_policy(tmp_path, positions=512)
    (tmp_path / "chat_template.jinja").write_text(FORGETFUL)
    turns = ("<think>one</think>1.", "<think>two</think>2.", "3.")
    async with scripted(tmp_path, *turns) as (client, _):
        messages = [{"role": "user", "content": "a"}]
        for role in ("tool", "user", "user"):
            choice = (await client.ok(CHAT, {"messages": messages, "user": "a"}))["choices"][0]
            messages += [choice["message"], {"role": role, "content": "b"}]
        (session,) = client.endpoint.sessions.all()
        whole, branch = (rollout for _, rollout in session.rollouts())
        assert [len(each.model_segments) for each in (whole, branch)] == [2, 1]
        shown = decoded(client, branch.prompt)
        assert "1." in shown and "2." in shown and "two" not in shown and "one" not in shown
        sampled = [token for each in (whole, branch) for token in each.model_tokens]
        renderer = client.endpoint.policy.renderer
        written = [[*renderer.encode_completion(text), 2] for text in turns]
        assert sampled == [token for each in written for token in each], "each of them once"
