"""Alarms reach a webhook, which cannot hold a peer up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from swarm.errors import UserError
from swarm.look.alarms import webhook
from swarm.look.alarms.board import Board
from swarm.look.alarms.webhook import Webhook, check
from swarm.settings import AlarmSettings


class Server:
    """An HTTP server on loopback that keeps what it gets, and answers from a list."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.heads: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.got = trio.Event()

    async def __call__(self, stream: trio.SocketStream) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += await stream.receive_some(1 << 16)
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        while len(body) < length:
            body += await stream.receive_some(1 << 16)
        self.heads.append(head.decode())
        self.bodies.append(json.loads(body))
        status = self.statuses.pop(0) if self.statuses else 200
        await stream.send_all(f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n".encode())
        if not self.statuses:
            self.got.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, self, [listener])
            yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}/hook/secret-in-the-path"
            nursery.cancel_scope.cancel()


class Told:
    """A board whose alarms are delivered, and the failures that go to the log."""

    def __init__(self, settings: AlarmSettings) -> None:
        self.webhook = Webhook(settings, self.emit, "me")
        self.board = Board(trio.current_time, lambda: 1e9, self.webhook.put)
        self.failures: list[dict[str, Any]] = []
        self.failed = trio.Event()

    def emit(self, name: str, **fields: Any) -> None:
        self.failures.append(fields)
        self.failed.set()


@asynccontextmanager
async def delivering(settings: AlarmSettings) -> AsyncIterator[Told]:
    told = Told(settings)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(told.webhook.run)
            yield told
            nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "PAUSES_SECONDS", (0.01, 0.01))


@pytest.mark.wall_clock
async def test_a_webhook_gets_the_alarm_with_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hush\n")
    server = Server(500, 503, 200)
    async with server.listening() as url:
        settings = AlarmSettings(webhook=url, webhook_token_file=str(tmp_path / "token"))
        async with delivering(settings) as told:
            told.board.sign("log_forked", "the log of …abc is forked")
            await server.got.wait()
        assert told.failures == []
    assert len(server.bodies) == 3, "a server in trouble is asked again"
    body = server.bodies[-1]
    assert body["state"] == "raised" and body["peer"] == "me"
    assert body["alarm"]["name"] == "log_forked"
    assert body["text"].startswith("[page] the log of …abc is forked (its key")
    assert "authorization: Bearer hush" in server.heads[-1].replace(
        "Authorization", "authorization"
    )


@pytest.mark.parametrize(("statuses", "asked"), [((404,), 1), ((500, 500, 500), 3)])
@pytest.mark.wall_clock
async def test_a_webhook_that_fails_is_a_sentence_without_secrets(
    statuses: tuple[int, ...], asked: int
) -> None:
    server = Server(*statuses)
    async with server.listening() as url, delivering(AlarmSettings(webhook=url)) as told:
        told.board.sign("log_forked", "forked")
        await told.failed.wait()
        (failure,) = told.failures
        assert failure["reason"] == f"127.0.0.1 answered with status {statuses[-1]}"
    assert len(server.bodies) == asked


@pytest.mark.wall_clock
async def test_a_dead_webhook_delays_nobody_and_only_the_newest_state_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "SECONDS_MAX", 0.05)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")  # accepts, never answers
    url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/"
    async with listener, delivering(AlarmSettings(webhook=url)) as told:
        told.board.sign("disk_low", "full")
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(1000):
            told.board.sign("log_forked", "forked")
            told.board.well("log_forked")
        assert not told.webhook._waiting, "what came and went meanwhile is not told"
        await told.failed.wait()
        assert told.failures[0]["reason"] == "127.0.0.1 did not answer within 0.05 s"


@pytest.mark.wall_clock
async def test_whoever_heard_of_an_alarm_hears_of_its_end() -> None:
    """Also if it ends, comes and goes again while it is being told."""
    server = Server(200, 200)
    async with server.listening() as url, delivering(AlarmSettings(webhook=url)) as told:
        told.board.sign("log_forked", "forked")
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(1000):
            told.board.well("log_forked")
            told.board.sign("log_forked", "forked again")
        told.board.well("log_forked")
        await server.got.wait()
    assert [body["state"] for body in server.bodies] == ["raised", "cleared"]


@pytest.mark.parametrize(
    "environment",
    [
        {"HTTPS_PROXY": "socks5://127.0.0.1:1"},
        {"HTTPS_PROXY": "http://[::1"},
        {"NO_PROXY": "[::1"},
        {"SSL_CERT_FILE": "/nowhere"},
    ],
)
@pytest.mark.wall_clock
async def test_an_environment_that_hinders_the_webhook_is_a_sentence(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    async with delivering(AlarmSettings(webhook="https://example.invalid/s3cret")) as told:
        told.board.sign("disk_low", "full")
        await told.failed.wait()
        reason = told.failures[0]["reason"]
        assert reason.startswith("a proxy or certificates that the environment names (HTTPS")
        assert "s3cret" not in reason


@pytest.mark.wall_clock
async def test_what_a_library_cannot_do_stops_nothing() -> None:
    async with delivering(AlarmSettings(webhook="https://xn--a/s3cret")) as told:
        told.board.sign("disk_low", "full")
        await told.failed.wait()
        assert told.failures[0]["reason"] == "it cannot be told (InvalidCodepoint)"


@pytest.mark.wall_clock
async def test_a_mild_alarm_is_told_only_if_it_is_wanted() -> None:
    server = Server(200)
    async with (
        server.listening() as url,
        delivering(AlarmSettings(webhook=url, severity="page")) as told,
    ):
        told.board.sign("clock_wrong", "an hour")
        told.board.sign("disk_low", "full")
        await server.got.wait()
    assert [body["alarm"]["name"] for body in server.bodies] == ["disk_low"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"webhook": "http://example.org/hook/s3cret"}, "'example.org' is neither https nor on"),
        ({"webhook": "file://host/etc/passwd"}, "is neither https nor on this machine"),
        ({"webhook": "file:///etc/passwd"}, "webhook is no address of a host"),
        ({"webhook": "https://[::1/s3cret"}, "webhook is no address of a host"),
        ({"webhook": "https://a:99999/s3cret"}, "webhook is no address of a host"),
        ({"webhook_token_file": "/nowhere"}, "webhook_token_file /nowhere cannot be read"),
        ({"webhook_token_file": "/dev/null"}, "must hold one line with the token"),
        ({"webhook": "https://a..b/s3cret"}, "webhook is no address of a host"),
    ],
)
def test_wrong_settings_are_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        check(AlarmSettings(**settings))
    assert sentence in str(error.value) and "s3cret" not in str(error.value)
