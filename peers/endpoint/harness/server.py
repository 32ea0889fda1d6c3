"""The endpoint that harnesses speak to, on the loopback interface. It has no engine: a request
waits for the model's text, and the bearer key says whose episode it belongs to."""

import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_hex
from typing import Any

from peers.endpoint import replies
from peers.endpoint.errors import ApiError
from peers.endpoint.harness.run import Run, Said
from peers.endpoint.requests import (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    RewardRequest,
    parse,
)
from peers.endpoint.responses import ResponsesForm, as_chat
from peers.endpoint.structure import structure_of
from peers.endpoint.tools import FORMS, CallForm, answer_of, message_of, tools_of
from peers.environments.interface import Conversation

BODY_BYTES_MAX = 8 << 20
CONNECTION_SECONDS = 60.0
"""A connection on which nothing is sent for so long is closed."""

MODEL = "policy"
"""Name of the model; requests may use any."""

SAMPLING = ("n", "temperature", "seed", "stop", "max_tokens", "max_completion_tokens", "logprobs")
"""Fields about sampling, which the run's manifest decides."""

REWARD_PATH = re.compile(r"/v1/rollouts/[^/]{1,200}/reward")


class Server:
    """Serves all runs of one environment, in threads that end with the process."""

    def __init__(self, ignores_sampling: bool, calls: CallForm | None) -> None:
        """`ignores_sampling`: whether fields about sampling are ignored rather than refused.
        `calls`: how the model writes calls of tools; None: there are no tools."""
        self.calls = calls
        self.runs: dict[str, Run] = {}
        """By bearer key."""
        self.ignores_sampling = ignores_sampling
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        threading.Thread(target=self._http.serve_forever, name="harness-http", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    owner: Server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = CONNECTION_SECONDS
    server: _Http

    def do_GET(self) -> None:
        self._serve(self._get)

    def do_POST(self) -> None:
        self._serve(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self, act: Callable[[Run], None]) -> None:
        try:
            try:
                act(self._run())
            except ApiError as error:
                self._send(error.body(), error.status)
        except OSError:  # the harness has closed the connection, or was killed
            self.close_connection = True

    def _run(self) -> Run:
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        run = self.server.owner.runs.get(key.strip()) if scheme.lower() == "bearer" else None
        if run is None:
            self.close_connection = True  # the body was not read
            raise ApiError(
                "the key is missing or that of no episode; send the header Authorization: Bearer "
                "with the value of OPENAI_API_KEY",
                status=401,
                code="invalid_api_key",
                kind="authentication_error",
            )
        return run

    def _get(self, run: Run) -> None:
        if self.path != "/v1/models":
            raise self._unknown()
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "swarm"}
        self._send({"object": "list", "data": [model]})

    def _post(self, run: Run) -> None:
        raw = self._body()
        if self.path == "/v1/chat/completions":
            chat = parse(raw, ChatRequest)
            self._answer(run, chat, replies.ChatForm(), self._conversation(chat))
        elif self.path == "/v1/responses":
            wanted = parse(raw, ResponsesRequest)
            chat = as_chat(wanted)
            self._answer(run, chat, ResponsesForm(wanted), self._conversation(chat))
        elif self.path == "/v1/completions":
            asked = parse(raw, CompletionRequest)
            if not isinstance(asked.prompt, str):
                raise ApiError(
                    "prompt is no text: a harness gets one turn of the model at a time, and has no "
                    "tokens; send one text",
                    param="prompt",
                )
            self._answer(run, asked, replies.CompletionForm(), asked.prompt)
        elif REWARD_PATH.fullmatch(self.path):
            given = parse(raw, RewardRequest)
            run.take_reward(given.reward, given.parts)
            self._send({"reward": given.reward})
        else:
            raise self._unknown()

    def _conversation(self, asked: ChatRequest) -> Conversation:
        tools = tools_of(asked)
        if tools and self.server.owner.calls is None:
            raise ApiError(
                "tools need the environment's option calls, which says how the model writes calls; "
                f"set it to one of {', '.join(FORMS)}",
                param="tools",
                code="unsupported_parameter",
            )
        if structure_of(asked, self.server.owner.calls) is not None:
            raise ApiError(
                "a worker samples as the policy is trained, so that no schema and no call can be "
                "forced; leave response_format out, and tool_choice at auto",
                param="response_format",
                code="unsupported_parameter",
            )
        messages = tuple(map(message_of, asked.messages))
        return Conversation(messages, (("tools", tools),) if tools else ())

    def _answer(
        self, run: Run, asked: ChatRequest | CompletionRequest, form: replies.Form, said: Said
    ) -> None:
        if not self.server.owner.ignores_sampling:
            _check_sampling(asked)
        found = run.ask(said)
        reply = replies.Reply(f"harness-{token_hex(12)}", int(time.time()), asked.model or MODEL)
        has_tools = isinstance(said, Conversation) and bool(said.variables)
        calls = self.server.owner.calls if has_tools else None
        text, called = answer_of(found.text, found.finish, calls)
        delta = replies.Delta(0, text, (), (), found.finish, called)
        if not asked.stream:
            self._send(form.whole(reply, [delta]))
            return
        events = [*form.opening(reply, 0), *form.event(reply, delta)]
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(b"".join(map(replies.as_event, events)) + replies.LAST_EVENT)

    def _body(self) -> bytes:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            self.close_connection = True
            raise ApiError(
                f"the header Content-Length is {length[:20]!r}; it must be a number, at most "
                f"{BODY_BYTES_MAX}",
                status=413,
            )
        return self.rfile.read(int(length))

    def _unknown(self) -> ApiError:
        return ApiError(
            f"{self.command} {self.path[:200]}: not found", status=404, code="not_found"
        )

    def _send(self, body: dict[str, Any], status: int = 200) -> None:
        raw = replies.encode(body)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _check_sampling(asked: ChatRequest | CompletionRequest) -> None:
    """Raise `ApiError` for a request that says how to sample."""
    for name in SAMPLING:
        value = getattr(asked, name, None)
        if value is None or value is False or (name == "n" and value == 1):
            continue
        raise ApiError(
            f"{name} is {str(value)[:60]}: the run's manifest decides how the policy is sampled; "
            'leave it out, or give the environment the option sampling = "ignore"',
            param=name,
            code="unsupported_parameter",
        )
