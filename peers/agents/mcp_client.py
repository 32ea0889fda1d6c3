"""A client of the Model Context Protocol: a session over the pipes of a program, or over HTTP.

It begins with `initialize`, which servers of every revision up to 2025-11-25 understand, and those
of later ones keep for such clients. A server's own requests are refused, but for `ping`."""

import json
import os
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta

from peers.agents.servers import Definition, Gone, Program, ServerError, bounded, decoded, left

REVISION = "2025-06-18"
CHUNK_BYTES = 1 << 16
UNKNOWN_METHOD = -32601
SESSION_HEADER = "mcp-session-id"
HEADERS = {
    "accept": "application/json, text/event-stream",
    "accept-encoding": "identity",
    "mcp-protocol-version": REVISION,
}

TOOLS_MAX = 128
PAGES_MAX = 16

TYPES = {bool: "boolean", int: "integer", str: "string"}
"""Simple types of JSON schema by Python's."""
WORDS = ("default", "description", "title")
"""Keys of a value's schema that ask for nothing."""

ERROR = "error: "
"""What begins the result of a call that failed."""

Json = dict[str, Any]


class Tool(msgspec.Struct, frozen=True):
    """A tool that a server lists."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}\Z")]
    schema: dict[str, Any] = msgspec.field(name="inputSchema")
    description: str | None = ""

    def definition(self) -> Json:
        """The tool as chat templates get it."""
        function = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.schema}}

    def surely_takes(self, arguments: Json) -> bool:
        """Whether arguments are those of a schema of simple types; False: it may refuse them."""
        known = self.schema.get("properties")
        wanted = known if isinstance(known, dict) else {}
        return arguments.keys() == wanted.keys() and all(
            isinstance(form := wanted[name], dict)
            and {key: form[key] for key in form if key not in WORDS}
            == {"type": TYPES.get(type(value))}
            for name, value in arguments.items()
        )


class RpcError(ServerError):
    """The server answers a request with an error; its session lives on."""


class McpSession(ABC):
    """A session with a server. Its methods raise `ServerError`."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.is_used = False
        """Whether a tool was called, which may have changed something."""
        self._number = 0

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _send(self, message: Json, deadline: float) -> None:
        """Send a message that gets no answer."""

    @abstractmethod
    def _asked(self, message: Json, deadline: float) -> Iterator[Any]:
        """Send a request, and give the messages that come."""

    def begin(self, deadline: float) -> None:
        """Agree on a revision."""
        client = {"name": "swarm", "version": "1"}
        given = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": client}
        self._request("initialize", given, deadline)
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"}, deadline)

    def tools(self, deadline: float) -> list[Tool]:
        """The tools that the server lists, by name."""
        found: list[Tool] = []
        parameters: Json = {}
        for _ in range(PAGES_MAX):
            page = self._request("tools/list", parameters, deadline)
            try:
                found += msgspec.convert(page.get("tools"), list[Tool])
            except msgspec.ValidationError as error:
                raise ServerError(f"lists tools that are none ({error})") from error
            bounded(len(msgspec.json.encode(found)), self.definition)  # of all pages: every prompt
            if (cursor := page.get("nextCursor")) is None:
                break
            parameters = {"cursor": cursor}
        if not 1 <= len(found) <= TOOLS_MAX or len({each.name for each in found}) < len(found):
            raise ServerError(f"lists no tools, more than {TOOLS_MAX}, or two of one name")
        return sorted(found, key=lambda each: each.name)

    def call(self, tool: Tool, arguments: Json, deadline: float) -> str:
        """What a call of a tool gives, as text.

        An error of the tool is told to the model, and so is that of arguments which do not fit."""
        given, self.is_used = {"name": tool.name, "arguments": arguments}, True
        try:
            found = self._request("tools/call", given, deadline)
        except RpcError as error:
            if not tool.surely_takes(arguments):
                return f"{ERROR}{error}"
            raise ServerError(f"refuses what the schema of {tool.name} allows: {error}") from error
        blocks = found.get("content", [])
        if not isinstance(blocks, list) or not all(isinstance(each, dict) for each in blocks):
            raise ServerError(f"answers a call of {tool.name} without a list of contents")
        texts = [str(each.get("text", f"[{each.get('type')!s:.40}]")) for each in blocks]
        if not texts and found.get("structuredContent") is not None:
            texts = [json.dumps(found["structuredContent"], ensure_ascii=False)]
        return (ERROR if found.get("isError") is True else "") + "\n".join(texts)

    def _request(self, method: str, parameters: Json, deadline: float) -> Json:
        """The result of a request; raises `RpcError` for an error that the server answers."""
        self._number += 1
        wanted = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": parameters}
        for message in self._asked(wanted, deadline):
            if not isinstance(message, dict):
                raise Gone(f"sends {message!r:.60}, which is no message")
            if "method" in message:
                if "id" in message:  # else it is a notification, such as a line of its log
                    self._refuse(message, deadline)
            elif message.get("id") != self._number:
                raise Gone(f"answers request {message.get('id')!r:.40}, another's")
            elif isinstance(message.get("error"), dict):
                raise RpcError(f"{message['error'].get('message')!s:.200}")
            elif isinstance(message.get("result"), dict):
                return dict(message["result"])
            else:
                raise Gone(f"answers {method} with neither a result nor an error")
        raise Gone(f"ended its answer to {method} too early")

    def _refuse(self, asked: Json, deadline: float) -> None:
        error = {"code": UNKNOWN_METHOD, "message": "this client has no such method"}
        answer = {"result": {}} if asked["method"] == "ping" else {"error": error}
        self._send({"jsonrpc": "2.0", "id": asked["id"], **answer}, deadline)


class PipeSession(McpSession):
    """A program that reads and writes a message in each line."""

    def __init__(self, definition: Definition) -> None:
        """Start it; raises `Gone`."""
        super().__init__(definition)
        self._program = Program(definition)
        process = self._program.process
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._rest = b""

    def close(self) -> None:
        self._program.end()

    def _send(self, message: Json, deadline: float) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            self._wait(self._input, selectors.EVENT_WRITE, deadline)
            try:
                data = data[os.write(self._input, data) :]
            except BrokenPipeError as error:
                raise Gone(self._program.words() or "closed its input") from error

    def _asked(self, message: Json, deadline: float) -> Iterator[Any]:
        self._send(message, deadline)
        size = 0
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                if line.strip():
                    yield decoded(line)
                continue
            self._wait(self._output, selectors.EVENT_READ, deadline)
            data = os.read(self._output, CHUNK_BYTES)
            if not data:
                raise Gone(self._program.words() or "closed its output")
            size += len(data)
            bounded(size, self.definition)
            self._rest += data

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            while not selector.select(left(deadline)):
                pass


class HttpSession(McpSession):
    """A server at a URL: each request is a POST, answered by JSON or by a stream of events."""

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        self._client = httpx.Client(headers={**HEADERS, **definition.headers})
        self._sockets: list[socket.socket] = []

    def close(self) -> None:
        with suppress(httpx.HTTPError, ServerError):
            if SESSION_HEADER in self._client.headers:
                with self._answer("DELETE", time.monotonic() + 1.0):
                    pass  # its body may have no end
        self._client.close()

    @contextmanager
    def _answer(
        self, method: str, deadline: float, message: Any = None
    ) -> Iterator[httpx.Response]:
        """Ask, and cut the connections at the deadline.

        httpx bounds each read alone, so that a head of a byte a second would take hours."""

        def cut() -> None:
            for each in self._sockets:
                with suppress(OSError):
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

        def connected(event: str, given: Json) -> None:
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                open_ones = [each for each in self._sockets if each.fileno() >= 0]
                self._sockets = [*open_ones, given["return_value"].get_extra_info("socket")]
                left(deadline)

        timer = threading.Timer(left(deadline), cut)
        timer.start()
        try:
            with self._client.stream(
                method,
                self.definition.url,
                json=message,
                timeout=left(deadline),
                extensions={"trace": connected},
            ) as reply:
                yield reply
        finally:
            timer.cancel()

    def _send(self, message: Json, deadline: float) -> None:
        for _ in self._asked(message, deadline):
            pass

    def _asked(self, message: Json, deadline: float) -> Iterator[Any]:
        try:
            with self._answer("POST", deadline, message) as reply:
                if reply.status_code >= 300:
                    raise Gone(f"answers with status {reply.status_code}; correct its url")
                if (session := reply.headers.get(SESSION_HEADER)) is not None:
                    if not (session.isascii() and session.isprintable()):
                        raise Gone(f"names its session {session!r:.60}, which is no visible ASCII")
                    self._client.headers[SESSION_HEADER] = session
                is_stream = "text/event-stream" in reply.headers.get("content-type", "")
                rest, size = b"", 0
                for chunk in reply.iter_raw():
                    left(deadline)
                    size += len(chunk)
                    bounded(size, self.definition)
                    rest += chunk
                    while is_stream and b"\n" in rest:
                        line, _, rest = rest.partition(b"\n")
                        if line.startswith(b"data:") and line[5:].strip():
                            yield decoded(line[5:])
                if rest.strip() and not is_stream:
                    yield decoded(rest)
        except httpx.TimeoutException:
            left(deadline)
            raise Gone("did not answer") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            left(deadline)
            to = self.definition.url
            raise Gone(f"cannot be reached at {to}, or hung up ({error}); start it") from error
