"""Who may come in, and how many at once."""

import hmac
import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from peers.endpoint.errors import ApiError
from peers.endpoint.replies import encode
from swarm.transport.http.local_server import is_addressed_as_loopback

REWARD_PREFIX = "/v1/rollouts/"
"""Paths of the rewards of sessions."""


SESSION_HEADER = "x-session-id"
"""The header in which `verifiers` and others name a rollout."""

SESSION_PATH = re.compile(r"/sessions/([\w.~:-]{1,200})(/.*)", re.ASCII)
"""The session in the path, for clients that know a base URL and no headers."""

UNREAD = frozenset({401, 403, 408, 413, 415, 429})
"""Statuses of requests whose body was not read: the connection cannot serve another one."""


@dataclass(frozen=True)
class Keys:
    """The bearer keys that a client must have; empty: none is needed."""

    agents: frozenset[str] = frozenset()
    """May generate."""
    rewards: frozenset[str] = frozenset()
    """May post rewards; empty: the agents' keys may."""

    @property
    def open(self) -> bool:
        return not self.agents and not self.rewards

    def allow(self, path: str, given: str) -> bool:
        """Whether a key opens a path."""
        wanted = self.agents
        if path.startswith(REWARD_PREFIX) and self.rewards:
            wanted = self.rewards
        elif self.agents:
            wanted = self.agents | self.rewards
        raw = given.encode()
        return not wanted or any([hmac.compare_digest(each.encode(), raw) for each in wanted])


class Gate:
    """ASGI middleware: checks the key, and bounds the requests under way."""

    def __init__(self, app: ASGIApp, keys: Keys, requests_max: int) -> None:
        self._app, self._keys, self._requests_max = app, keys, requests_max
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if found := SESSION_PATH.fullmatch(scope["path"]):
            header = (SESSION_HEADER.encode(), found[1].encode())
            scope = {**scope, "path": found[2], "headers": [header, *scope["headers"]]}
        problem = self._problem(scope["path"], Headers(scope=scope))
        if problem is not None:
            await error_response(problem)(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1

    def _problem(self, path: str, headers: Headers) -> ApiError | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not self._keys.allow(path, key.strip() if scheme.lower() == "bearer" else ""):
            return ApiError(
                "the key is missing or wrong; send the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                kind="authentication_error",
            )
        if self._keys.open and not is_addressed_as_loopback(headers.get("host", "")):
            return ApiError(
                "an endpoint without a key answers to 127.0.0.1, [::1] and localhost only",
                status=403,
                kind="authentication_error",
            )
        if self._running >= self._requests_max:
            return ApiError(
                f"{self._running} requests are under way, the most allowed; try again later",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
        return None


def error_response(error: ApiError) -> Response:
    """An error in OpenAI's form."""
    headers = {"retry-after": "1"} if error.status == 429 else {}
    if error.status in UNREAD:
        headers["connection"] = "close"
    return Response(
        encode(error.body()), error.status, headers=headers, media_type="application/json"
    )
