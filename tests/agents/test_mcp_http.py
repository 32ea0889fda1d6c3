"""The environment `mcp` with servers over HTTP that never come to an end."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from peers.environments import Environment, load, task_of
from peers.environments.play import Episode
from swarm.errors import UserError
from tests.agents.servers import PIPES, call, options, write

SENT_MAX = 32 << 20
DRIPS_MAX = 600
"""A server goes on for a minute, so that a client without a deadline fails, and does not hang."""


class Server:
    """Answers as MODE says; the last request is a call, or the end of the session."""

    def __init__(self, mode: str) -> None:
        self.mode, self.sent_bytes = mode, 0
        self.farewell = threading.Event()
        """The client has hung up, or the server has done its worst."""
        self.ended = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/mcp"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.ended.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection = self.listener.accept()[0]
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as asked, suppress(OSError):
            while head := asked.readline():
                size = 0
                while (line := asked.readline().lower()) != b"\r\n":
                    name, _, value = line.partition(b":")
                    size = int(value) if name == b"content-length" else size
                message = json.loads(asked.read(size) or "{}")
                self._answer(connection, message, is_farewell=head.startswith(b"DELETE"))

    def _answer(self, connection: socket.socket, message: Any, is_farewell: bool) -> None:
        method, result = message.get("method"), {}
        if is_farewell:
            try:
                self._misbehave(connection)
            finally:
                self.farewell.set()
        elif method == "tools/list":
            tool = {"name": "add", "inputSchema": {"type": "object"}}
            result = {"tools": [tool]}
        elif method == "tools/call":
            result = {"content": [{"type": "text", "text": "3"}]}
            if not self.mode.startswith("farewell"):
                self._misbehave(connection)
        body = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), "result": result})
        session = "\xff\x01" if self.mode == "session" else "a"
        lines = f"content-length: {len(body)}\r\nmcp-session-id: {session}"
        connection.sendall(f"HTTP/1.1 200 OK\r\n{lines}\r\n\r\n{body}".encode("latin-1"))

    def _misbehave(self, connection: socket.socket) -> None:
        match self.mode.removeprefix("farewell "):
            case "head":
                self._drip(connection, b"HTTP/1.1 200 OK\r\nx: ", b"x")
            case "hints":
                self._drip(connection, b"", b"HTTP/1.1 103 Early Hints\r\n\r\n")
            case "chunk":
                head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;"
                self._drip(connection, head, b"x")
            case "body":
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n")
                while self.sent_bytes < SENT_MAX:
                    self.sent_bytes += connection.send(bytes(1 << 16))
            case "elsewhere":
                lines = f"location: {self.url}\r\ncontent-length: 0"
                connection.sendall(f"HTTP/1.1 307 There\r\n{lines}\r\n\r\n".encode())

    def _drip(self, connection: socket.socket, head: bytes, rest: bytes) -> None:
        connection.sendall(head)
        for _ in range(DRIPS_MAX):
            connection.sendall(rest)
            if self.ended.wait(0.1):
                return


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.close()


def played(server: Server, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Environment, Episode]:
    write(folder, patch, PIPES, command=None, url=server.url, seconds=1.0, answer_bytes=65536)
    environment = load("mcp", "1", options(folder))
    return environment, Episode(environment, task_of(environment, bytes(32)))


@pytest.mark.parametrize(
    ("server", "complaint"),
    [
        ("head", "did not answer in time; raise seconds"),
        ("hints", "did not answer in time; raise seconds"),
        ("chunk", "did not answer in time; raise seconds"),
        ("body", "sent an answer of more than 65536 bytes"),
        ("elsewhere", "answers with status 307; correct its url"),
    ],
    indirect=["server"],
)
def test_an_answer_without_an_end_is_a_sentence(
    server: Server, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, episode = played(server, tmp_path, monkeypatch)
    began = time.monotonic()
    with pytest.raises(UserError, match=f"server 'here' {complaint}"):
        episode.step(call("add", x=1))
    assert time.monotonic() - began < 30, "it goes on for a minute"


@pytest.mark.parametrize("server", ["farewell head", "farewell body"], indirect=True)
def test_a_session_ends_within_a_second_whatever_its_server_says_to_that(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, episode = played(server, tmp_path, monkeypatch)
    episode.step(call("add", x=1))
    began = time.monotonic()
    assert episode.step("4") is None
    assert time.monotonic() - began < 30, "it goes on for a minute"
    assert server.farewell.wait(60) and server.sent_bytes < SENT_MAX


@pytest.mark.parametrize("server", ["session"], indirect=True)
def test_a_session_whose_name_fits_no_header_is_a_sentence(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"server 'here' names its session 'ÿ.x01', which is no"):
        played(server, tmp_path, monkeypatch)
