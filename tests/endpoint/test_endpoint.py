"""The endpoint over real HTTP: the two forms, streams, sessions, records and refusals."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
import torch
import trio
import typer
from hypothesis import given
from hypothesis import strategies as st

from peers.endpoint.command import endpoint
from peers.endpoint.errors import ApiError
from peers.endpoint.gate import Keys
from peers.endpoint.requests import ChatRequest, CompletionRequest, RewardRequest, parse
from peers.endpoint.server import Options, make_endpoint, read_keys
from peers.engines.engine import Engine, Piece
from peers.engines.noise import Drawn
from peers.engines.registry import make_engine
from peers.engines.winners import judge_margins
from peers.proofs import toploc
from swarm.errors import UserError, leaf_errors
from swarm.look.rollouts.filters import Filters
from swarm.look.rollouts.sources import open_source
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import ReadLimits, read
from swarm.transport.http import connections
from swarm.transport.http.local_server import open_listener
from swarm.wire.identity import Identity
from tests.endpoint.harness import Client, serving

RUNNER = trio.run


def json_of_fields() -> st.SearchStrategy[bytes]:
    """Requests whose fields have values of any kind."""
    leaf = st.sampled_from([None, True, -1, 1 << 70, 0.5, "a", [], {}, [[1]], {"role": 1}])
    value = leaf | st.lists(leaf, max_size=2)
    known = [*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__]
    others = ["reward", "parts", "tools", "top_p", "colour"]
    names = st.sampled_from([*known, *others])
    return st.dictionaries(names, value, max_size=6).map(lambda body: json.dumps(body).encode())


async def test_streams_say_what_whole_replies_say(policy_folder: Path) -> None:
    async with serving(policy_folder) as client:
        asked = {"prompt": "428190>", "max_tokens": 20, "seed": 7, "n": 2, "logprobs": 0}
        whole = await client.ok("/v1/completions", asked)
        events = await client.events(
            "/v1/completions", asked | {"stream": True, "stream_options": {"include_usage": True}}
        )
        assert events[-1]["usage"] == whole["usage"] and len(events) > 4
        for choice in whole["choices"]:
            of_it = [e["choices"][0] for e in events[:-1]]
            of_it = [each for each in of_it if each["index"] == choice["index"]]
            assert "".join(each["text"] for each in of_it) == choice["text"]
            assert of_it[-1]["finish_reason"] == choice["finish_reason"]
            values = [v for each in of_it for v in each["logprobs"]["token_logprobs"]]
            assert values == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": -1}
        said = await client.ok("/v1/chat/completions", chat)
        events = await client.events("/v1/chat/completions", chat | {"stream": True})
        deltas = [each["choices"][0]["delta"] for each in events]
        assert deltas[0]["role"] == "assistant"
        text = "".join(each.get("content", "") for each in deltas)
        assert text == said["choices"][0]["message"]["content"]


async def test_a_text_ends_a_completion(policy_folder: Path) -> None:
    async with serving(policy_folder) as client:
        asked = {"prompt": "1>", "max_tokens": 30, "seed": 1}
        free = (await client.ok("/v1/completions", asked))["choices"][0]["text"]
        stop = free[9:11]
        streamed = asked | {"stop": [stop], "stream": True}
        events = await client.events("/v1/completions", streamed)
        cut = "".join(each["choices"][0]["text"] for each in events)
        assert cut == free[: free.index(stop)]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        (whole,) = (await client.ok("/v1/completions", asked | {"stop": stop}))["choices"]
        assert (whole["text"], whole["finish_reason"]) == (cut, "stop")


async def test_a_session_is_recorded_token_by_token_with_seeds_and_proofs(
    policy_folder: Path, tmp_path: Path
) -> None:
    async with serving(policy_folder, record=tmp_path) as client:
        sessions = client.endpoint.sessions  # with noise that ends these turns early
        sessions.worker, sessions.nonce = Identity(bytes(32)).peer_id, bytes(32)
        body = {"max_tokens": 30, "stop": [*"abcdefghijklmnop"]}

        def episodes() -> list[list[list[int]]]:
            """The tokens of each segment."""
            found = sessions.find("an agent").rollouts()
            return [[list(each.tokens) for each in rollout.segments] for _, rollout in found]

        async def turn(tokens: list[int]) -> list[int]:
            await client.ok("/v1/completions", body | {"prompt": tokens}, x_session_id="an agent")
            return [token for tokens in episodes()[-1] for token in tokens]

        first = await turn([1, 4, 14])
        second = await turn([*first, 44, 45])
        await turn([*second, 46])
        await turn([*first, 47])  # a fork
        one, fork = episodes()
        assert (one[0], one[2], one[4]) == ([1, 4, 14], [44, 45], [46]) and len(one) == 6
        assert fork[0] == [*first, 47] and len(fork) == 2
        posted = await client.ok(
            "/v1/rollouts/an agent/reward", {"reward": 0.25, "parts": {"style": 0.5}}
        )
        assert posted["episodes"] == 2
        _check(Path(posted["file"]), make_engine("native", policy_folder))
        shown = list(open_source(Path(posted["file"]), tokenizer=policy_folder).rollouts(Filters()))
        assert [(each.environment, each.reward) for each in shown] == [("endpoint", 0.25)] * 2
        status, found = await client.post("/v1/rollouts/an agent/reward", {"reward": 1})
        assert status == 404 and "is not open" in found["error"]["message"]


def _check(file: Path, engine: Engine) -> None:
    """A validator's look at a recorded file: proofs, and tokens that follow from the seed."""
    submission = read(file, ReadLimits(1 << 20, 8, 64, 64, 64))
    assert submission.header.policy == 3
    note = msgspec.json.decode(file.with_suffix(".json").read_bytes())
    assert (note["session"], note["reward"], note["parts"]) == ("an agent", 0.25, {"style": 0.5})
    for row, draws in enumerate(note["episodes"]):
        check_row(submission.rollouts, row, draws, engine)


def check_row(rollouts: Rollouts, index: int, draws: list[Any], engine: Engine) -> None:
    """What a validator asks of a row: its proofs hold, and its tokens follow from the seed."""
    rollout = rollouts.rollout(index)
    prefill = engine.prefill([rollout.tokens], [rollout.sampled])
    chunks = toploc.chunk_rows(prefill.prompt_hidden[0], prefill.hidden[0])
    proof = rollouts.proof(index)
    proofs = [proof[at : at + 258] for at in range(0, len(proof), 258)]
    assert all(each.accepted for each in toploc.verify(chunks, proofs))
    key, rows = draws[0]["key"], {draw["row"] for draw in draws}
    (temperature,) = {draw["temperature"] for draw in draws}
    count = len(rollout.model_tokens)
    noise = Drawn(tuple(key), torch.full((count,), rows.pop()), torch.arange(count)).noise(64)
    tokens = torch.tensor(rollout.model_tokens)
    judged = judge_margins(engine.logits(prefill.states[0]), tokens, temperature, noise)
    assert judged.margin.max() < 1e-3 / temperature
    reported = rollout.log_probabilities
    assert judged.log_probability.tolist() == pytest.approx(reported, abs=1e-3 / temperature)


async def test_texts_and_messages_continue_the_tokens_that_were_sampled(
    policy_folder: Path,
) -> None:
    async with serving(policy_folder) as client:
        # `<unk>` is one token when sampled, and five when its text is encoded.
        text = "1>"
        for seed in (1, 2):  # they end before the token limit
            asked = {"prompt": text, "max_tokens": 12, "stop": [*"abcdefghij"], "user": "text"}
            found = await client.ok("/v1/completions", asked | {"seed": seed})
            text += found["choices"][0]["text"] + "a 2>"
        messages = [{"role": "user", "content": "a"}]
        for seed in (3, 4):
            asked = {"messages": messages, "max_tokens": 8, "stop": [*"abcdefghijklmnop"]}
            said = await client.ok("/v1/chat/completions", asked | {"user": "chat", "seed": seed})
            content = said["choices"][0]["message"]["content"]
            messages = [
                *messages,
                {"role": "assistant", "content": content},
                {"role": "user", "content": "b"},
            ]
        for name in ("text", "chat"):
            _, rollout = client.endpoint.sessions.find(name).rollouts()[0]
            kinds = [each.kind for each in rollout.segments]
            assert kinds == ["prompt", "model", "environment", "model"], rollout


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": "a", "top_p": 0.5}, "top_p", "without top-p"),
    ({"prompt": "a", "logprobs": 5}, "logprobs", "only the sampled token's"),
    ({"prompt": "a", "colour": 1}, "colour", "is unknown"),
    ({"prompt": "a", "temperature": -1}, "temperature", ">= 0"),
    ({"prompt": "a", "temperature": 1e-300}, "temperature", "at least 0.01"),
    ({"prompt": "a" * 40_000, "n": 128}, "prompt", "has 40000 characters"),
    ({"messages": [{"role": "user", "content": "a" * 2000}]}, "messages", "2000 characters"),
    ({"prompt": "a", "n": 500}, "n", "<= 128"),
    ({"prompt": [1, "a"]}, "prompt", "mixes"),
    ({"prompt": [99999]}, "", "outside the vocabulary"),
    ({"prompt": "a", "max_tokens": 999}, "max_tokens", "at most 100"),
    ({"prompt": "a", "max_tokens": 63}, "", "context has 64"),
    ({"prompt": "a", "stop": "x" * 257}, "stop", "length <= 256"),
    ({"prompt": "a", "stop": ["x" * 257]}, "stop", "length <= 256"),
    ({"prompt": "a", "model": "gpt"}, "model", "is not served here"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools", "missing"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "last message"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "Invalid"),
]


async def test_what_is_not_supported_is_refused_with_a_sentence(policy_folder: Path) -> None:
    async with serving(policy_folder, tokens_max=100, body_bytes_max=50_000) as client:
        for body, param, words in REFUSED:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            status, found = await client.post(path, body)
            assert status in (400, 404), (body, found)
            assert words in found["error"]["message"], found
            assert (found["error"]["param"] or "").startswith(param), found
        assert client.endpoint.sessions.count == 0
        for raw, kind, status in (
            (b"{", "application/json", 400),
            (b"[" * 40_000, "application/json", 400),
            (b"{}", "text/plain", 415),
            (b" " * 50_001, "application/json", 413),
        ):
            headers = {"content-type": kind}
            reply = await client.http.post("/v1/completions", content=raw, headers=headers)
            assert reply.status_code == status and reply.json()["error"]["message"]
        foreign = await client.http.get("/v1/models", headers={"host": "evil.example"})
        assert foreign.status_code == 403
        assert (await client.http.get("/v1/nothing")).json()["error"]["code"] == "not_found"


@given(st.binary(max_size=80) | json_of_fields())
def test_no_body_raises_anything_but_a_refusal(raw: bytes) -> None:
    kinds: list[Any] = [CompletionRequest, ChatRequest, RewardRequest]
    for kind in kinds:
        with suppress(ApiError):
            parse(raw, kind)


async def test_keys_rewards_crowds_and_deadlines(policy_folder: Path, tmp_path: Path) -> None:
    keys = Keys(frozenset({"a" * 16}), frozenset({"h" * 16}))
    async with serving(policy_folder, record=tmp_path, keys=keys) as client:
        body = {"prompt": "a", "user": "s"}
        assert (await client.post("/v1/completions", body))[0] == 401
        agent, harness = "Bearer " + "a" * 16, "Bearer " + "h" * 16
        assert (await client.post("/v1/completions", body, authorization="Bearer x"))[0] == 401
        assert (await client.post("/v1/completions", body, authorization=agent))[0] == 200
        path, reward = "/v1/rollouts/s/reward", {"reward": 1.0}
        assert (await client.post(path, reward, authorization=agent))[0] == 401
        status, found = await client.post(path, {"reward": 1.2}, authorization=harness)
        assert status == 400 and "<= 1.0" in found["error"]["message"]
        client.endpoint.limits.__dict__["deadline_seconds"] = 0.0
        status, found = await client.post("/v1/completions", body, authorization=harness)
        assert status == 504 and "within 0 s" in found["error"]["message"]
        events = await _events(client, body | {"stream": True}, agent)
        assert b"was not finished within" in events
        assert (await client.post(path, reward, authorization=harness))[0] == 200
        assert client.endpoint.generator.driver.live == 0


async def _events(client: Client, body: Any, key: str) -> bytes:
    headers = {"authorization": key}
    return (await client.http.post("/v1/completions", json=body, headers=headers)).content


class Endless:
    """An engine whose requests never finish, or whose steps fail."""

    def __init__(self, engine: Engine, error: Exception | None = None) -> None:
        self._engine, self._error = engine, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Piece]:
        if self._error is not None:
            raise self._error
        return []


async def test_an_engine_that_fails_ends_the_endpoint_with_a_sentence(policy_folder: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        async with serving(policy_folder) as client:
            driver = client.endpoint.generator.driver
            driver.engine = cast(Engine, Endless(driver.engine, RuntimeError("no device")))
            await client.post("/v1/completions", {"prompt": "a"})
    sentences = [str(leaf) for leaf in leaf_errors(raised.value)]
    assert any("the engine failed (RuntimeError: no device)" in each for each in sentences)


async def test_a_client_that_leaves_cancels_its_generation(policy_folder: Path) -> None:
    async with serving(policy_folder, requests_max=1) as client:
        driver = client.endpoint.generator.driver
        client.endpoint.generator.driver.engine = cast(
            Engine, Endless(client.endpoint.generator.driver.engine)
        )
        for stream in (False, True):
            async with trio.open_nursery() as nursery:
                body = {"prompt": "a", "user": "s", "stream": stream}
                nursery.start_soon(client.post, "/v1/completions", body)
                with trio.fail_after(5):
                    while not driver.live:
                        await trio.lowlevel.checkpoint()
                status, found = await client.post("/v1/completions", body)
                assert status == 429 and "under way" in found["error"]["message"]
                nursery.cancel_scope.cancel()
            with trio.fail_after(5):
                while driver.live or client.endpoint.sessions.session("s", 0.0).episodes:
                    await trio.lowlevel.checkpoint()


def written(folder: Path) -> int:
    """How many files of sessions are in a folder."""
    return len(list(folder.rglob("*.parquet")))


async def test_sessions_that_rest_are_written_and_closed(
    policy_folder: Path, tmp_path: Path
) -> None:
    async with serving(policy_folder, record=tmp_path, idle_seconds=0.0) as client:
        await client.ok("/v1/completions", {"prompt": "a", "user": "s"})
        await client.endpoint.close_resting()
        assert client.endpoint.sessions.count == 0
    assert written(tmp_path) == 1


def test_a_command_that_is_told_to_end_writes_its_sessions(
    policy_folder: Path, tmp_path: Path
) -> None:
    reading, writing = os.pipe()

    def ask() -> None:
        try:
            with os.fdopen(reading) as said:
                url = said.readline().split()[-1]
            body = {"prompt": "a", "max_tokens": 2}
            httpx.post(f"{url}/completions", json=body, trust_env=False).raise_for_status()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask, daemon=True)
    with os.fdopen(writing, "w") as said, redirect_stdout(said), pytest.raises(typer.Exit):
        asking.start()
        endpoint(str(policy_folder), listen="127.0.0.1:0", record=tmp_path)
    asking.join(20)
    assert written(tmp_path) == 1


async def test_a_session_that_is_used_again_while_another_is_written_stays_open(
    policy_folder: Path, tmp_path: Path
) -> None:
    async with serving(policy_folder, record=tmp_path, idle_seconds=0.0) as client:
        sessions = client.endpoint.sessions
        for name in ("a", "b"):
            await client.ok("/v1/completions", {"prompt": "a", "user": name})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.endpoint.close_resting)
            while sessions.count == 2:
                await trio.lowlevel.checkpoint()
            sessions.session("b", trio.current_time())
        assert [session.name for session in sessions.all()] == ["b"]


async def test_a_session_that_cannot_be_written_stays_open(
    policy_folder: Path, tmp_path: Path
) -> None:
    record = tmp_path / "sessions"
    async with serving(policy_folder, record=record) as client:
        body = {"prompt": "12>", "max_tokens": 2, "user": "a"}
        await client.ok("/v1/completions", body)
        record.rmdir()
        record.write_text("in the way")
        for _ in range(2):
            status, found = await client.post("/v1/rollouts/a/reward", {"reward": 0.5})
            assert status == 507 and "cannot be written" in found["error"]["message"], found
        await client.ok("/v1/completions", body)
        record.unlink()
        assert (await client.ok("/v1/rollouts/a/reward", {"reward": 0.5}))["episodes"] == 2


def test_an_endpoint_for_others_needs_a_key(tmp_path: Path) -> None:
    key, other, short = tmp_path / "key", tmp_path / "other", tmp_path / "short"
    key.write_text("k" * 20)
    other.write_text("o" * 20)
    short.write_text("k")
    assert read_keys("127.0.0.1:1", None, None).open
    assert read_keys("[::1]:1", None, None).open
    assert not read_keys("0.0.0.0:1", key, other).open
    for listen, one, two, words in (
        ("0.0.0.0:1", None, None, "a key is needed"),
        ("127.0.0.1:1", short, None, "at least 16"),
        ("127.0.0.1:1", tmp_path / "none", None, "cannot be read"),
        ("127.0.0.1:1", None, key, "without --key-file"),
        ("127.0.0.1:1", key, key, "the same key"),
    ):
        with pytest.raises(UserError, match=words):
            read_keys(listen, one, two)
    for listen in ("8000", "127.0.0.1:99999", "127.0.0.1:x", "203.0.113.1:80"):
        with pytest.raises(UserError, match="--listen"):
            open_listener(listen)
    with pytest.raises(UserError, match="is no host:port"):
        read_keys("8000", None, None)
    with pytest.raises(UserError, match="is no folder"):
        make_endpoint(Options(tmp_path / "none", "none", 0, "native"), Keys())


async def test_connections_are_bounded_and_never_become_http_2(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle connection of HTTP/2 would stay open."""
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)

    async def reply(port: int, sent: bytes) -> bytes:
        """What comes until the endpoint closes, or has answered."""
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            with trio.fail_after(15), suppress(trio.BrokenResourceError):
                await stream.send_all(sent)
                return bytes(await stream.receive_some())
        return b""

    async with serving(policy_folder) as client:
        port = client.http.base_url.port
        assert port is not None
        for sent, answer in (
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), b""),
            (
                b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: h2c\r\n\r\n",
                b"HTTP/1.1 200",
            ),
        ):
            assert (await reply(port, sent))[:12] == answer
        held = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2)]
        asked = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        assert (await reply(port, asked))[:12] == b"HTTP/1.1 200"
        with trio.fail_after(15), suppress(trio.BrokenResourceError):
            assert await held[0].receive_some() == b"", "the one that waited makes way"
        for stream in held:
            await stream.aclose()
