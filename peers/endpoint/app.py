"""The endpoint's HTTP interface: an ASGI application."""

import traceback
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from peers.endpoint import requests
from peers.endpoint.errors import ApiError, deadline_error
from peers.endpoint.gate import SESSION_HEADER, Gate, Keys, error_response
from peers.endpoint.generating import Begun, Generator
from peers.endpoint.jobs import Job, chat_job, completion_job, responses_job
from peers.endpoint.policy import Policy
from peers.endpoint.recording import Sessions
from peers.endpoint.replies import LAST_EVENT, Delta, Reply, as_event, encode
from peers.endpoint.sessions import Session
from swarm.world.tasks import alongside

BODY_SECONDS = 30.0
"""Time for a request's body to arrive."""

GONE = 499
"""Status for a client that has left; nobody sees it."""


@dataclass(frozen=True)
class EndpointLimits:
    """What one request, and all together, may use."""

    body_bytes_max: int = 8 << 20
    requests_max: int = 256
    """At once; further ones are refused with 429."""
    tokens_max: int = 1 << 14
    """Of one choice."""
    deadline_seconds: float = 600.0
    """For one request."""
    idle_seconds: float = 600.0
    """A session without a request for so long is written and closed."""


@dataclass(frozen=True)
class Endpoint:
    """Handles the requests."""

    policy: Policy
    generator: Generator
    sessions: Sessions
    limits: EndpointLimits
    keys: Keys

    def app(self) -> Starlette:
        """The ASGI application."""
        post = ["POST"]
        completion = self._generate(requests.CompletionRequest, completion_job)
        chat = self._generate(requests.ChatRequest, chat_job)
        responses = self._generate(requests.ResponsesRequest, responses_job)
        return Starlette(
            routes=[
                Route("/v1/completions", completion, methods=post),
                Route("/v1/chat/completions", chat, methods=post),
                Route("/v1/responses", responses, methods=post),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/v1/rollouts/{session:path}/reward", self._reward, methods=post),
            ],
            middleware=[Middleware(Gate, keys=self.keys, requests_max=self.limits.requests_max)],
            exception_handlers={
                ApiError: _on_error,
                HTTPException: _on_http,
                ClientDisconnect: _on_gone,
                Exception: _on_bug,
            },
        )

    def _generate(
        self, kind: type[Any], job_of: Callable[[Any, str | None, Policy], Job]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            asked = requests.parse(await self._body(request), kind)
            name = request.headers.get(SESSION_HEADER)
            if name is not None and not 1 <= len(name) <= requests.NAME_MAX:
                told = f"the header X-Session-ID has {len(name)} characters"
                raise ApiError(f"{told}; 1 to {requests.NAME_MAX} are allowed")
            job = job_of(asked, name, self.policy)
            begun = self.generator.begin(job)
            if job.stream:
                return Stream(self, begun)
            return await self._whole(begun, request.receive)

        return handle

    async def _whole(self, begun: Begun, receive: Receive) -> Response:
        """Generate all of a reply, unless the client leaves."""

        async def make() -> Response:
            with trio.move_on_after(self.limits.deadline_seconds):
                choices = await self.generator.run(begun)
                return _json(begun.job.form.whole(self.reply(begun), choices))
            raise deadline_error(self.limits.deadline_seconds)

        try:
            return await unless_gone(receive, make) or Response(status_code=GONE)
        finally:
            begun.abandon()

    def reply(self, begun: Begun) -> Reply:
        """What all forms of the reply have in common."""
        return Reply(
            id=begun.job.id,
            created=begun.job.created,
            model=self.policy.name,
            renderer=self.policy.renderer,
            prompt_tokens=begun.prompt_tokens,
            wants_log_probabilities=begun.job.wants_log_probabilities,
        )

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self.policy.name,
            "object": "model",
            "created": 0,
            "owned_by": "swarm",
            "max_model_len": self.policy.length_max,
        }
        return _json({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        return _json({"requests": self.generator.driver.live, "sessions": self.sessions.count})

    async def _metrics(self, request: Request) -> Response:
        generator = self.generator
        figures = [
            ("requests_running", "gauge", generator.driver.live),
            ("sessions_open", "gauge", self.sessions.count),
            ("sessions_total", "counter", self.sessions.opened),
            *((f"{name}_total", "counter", count) for name, count in generator.counted.items()),
        ]
        text = "".join(
            f"# TYPE swarm_endpoint_{name} {kind}\nswarm_endpoint_{name} {value}\n"
            for name, kind, value in figures
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _reward(self, request: Request) -> Response:
        """Take a session's reward, write the session and close it."""
        asked = requests.parse(await self._body(request), requests.RewardRequest)
        session = self.sessions.find(request.path_params["session"])
        if self.sessions.folder is None:
            raise ApiError(
                "this endpoint records nothing; start it with --record FOLDER to keep rewards"
            )
        if not session.is_idle:
            raise ApiError(
                f"session {session.name!r} is generating; post its reward when it is over",
                status=409,
                code="session_busy",
            )
        path = await self.close(session, asked.reward, asked.parts)
        return _json(
            {"session": session.name, "reward": asked.reward, "file": path, **_sizes(session)}
        )

    async def close(
        self, session: Session, reward: float | None = None, parts: dict[str, float] | None = None
    ) -> str:
        """Close an idle session, release its caches, write it. It stays open if that raises
        `ApiError`."""
        self.sessions.close(session)
        for episode in session.episodes:
            if episode.last is not None:
                self.generator.driver.release(episode.last)
                episode.last = None
        write = partial(self.sessions.write, session, reward, parts or {})
        path = ""
        with trio.CancelScope(shield=True):
            try:
                path += await trio.to_thread.run_sync(write)
            except OSError as error:
                self.sessions.reopen(session)
                raise ApiError(
                    f"session {session.name!r} cannot be written ({error}) and stays open; make "
                    "room in the folder of --record, and post its reward again",
                    status=507,
                    kind="server_error",
                    code="not_recorded",
                ) from error
        return path

    async def close_resting(self) -> str:
        """Close sessions that are idle for too long, or too many; returns why one stays open."""
        before = trio.current_time() - self.limits.idle_seconds
        # Asked again after each: a request may have used one while another was written.
        while resting := self.sessions.resting(before):
            try:
                await self.close(resting[0])
            except ApiError as error:
                return error.message
        return ""

    async def _body(self, request: Request) -> bytes:
        """The body, within its bounds of type, size and time; raises `ApiError`."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(f"the content type is {kind[:80]!r}; send application/json", status=415)
        most, parts, size = self.limits.body_bytes_max, [], 0
        with trio.move_on_after(BODY_SECONDS):
            async with aclosing(request.stream()) as stream:
                async for part in stream:
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise ApiError(
                            f"the body has more than {most} bytes, the most allowed; send less",
                            status=413,
                        )
            return b"".join(parts)
        raise ApiError(
            f"the body did not arrive within {BODY_SECONDS:g} s; send it at once", status=408
        )


class Stream(Response):
    """Server-sent events of one request."""

    media_type = "text/event-stream"

    def __init__(self, endpoint: Endpoint, begun: Begun) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._endpoint, self._begun = endpoint, begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the reply is whole, the client leaves, or time is up."""
        try:
            await self._send(receive, send)
        finally:
            self._begun.abandon()

    async def _send(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def put(event: bytes) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": True})

        seconds = self._endpoint.limits.deadline_seconds

        async def make() -> bool:
            try:
                with trio.move_on_after(seconds):
                    await self._events(put)
                    return True
                raise deadline_error(seconds)
            except ApiError as error:
                await put(as_event(error.body()))
            return True

        if await unless_gone(receive, make):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, put: Callable[[bytes], Awaitable[None]]) -> None:
        begun, reply = self._begun, self._endpoint.reply(self._begun)
        form = begun.job.form

        async def tell(delta: Delta) -> None:
            await put(b"".join(map(as_event, form.event(reply, delta))))

        for index in range(len(begun.turns)):
            for opening in form.opening(reply, index):
                await put(as_event(opening))
        choices = await self._endpoint.generator.run(begun, tell)
        if begun.job.stream_usage:
            tokens = sum(len(choice.tokens) for choice in choices)
            await put(b"".join(map(as_event, form.closing(reply, tokens))))
        await put(LAST_EVENT)


T = TypeVar("T")


async def unless_gone(receive: Receive, make: Callable[[], Awaitable[T]]) -> T | None:
    """The result of `make`, or None if the client leaves before: then it is cancelled."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with alongside(until=gone):
        return await make()
    return None


def _json(body: dict[str, Any]) -> Response:
    return Response(encode(body), media_type="application/json")


def _sizes(session: Session) -> dict[str, int]:
    found = session.rollouts()
    return {"episodes": len(found), "tokens": sum(episode.sampled for episode, _ in found)}


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    return error_response(
        ApiError(f"{where[:200]}: {error.detail}", status=error.status_code, code="not_found")
    )


async def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _on_bug(request: Request, error: Exception) -> Response:
    traceback.print_exception(error)
    return error_response(
        ApiError(f"the endpoint failed ({type(error).__name__})", status=500, kind="server_error")
    )
