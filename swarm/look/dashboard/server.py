"""The page's HTTP server: read-only, with a token, for this machine alone, or for anybody."""

import base64
import binascii
import hmac
import socket
from dataclasses import dataclass, field
from importlib.resources import files
from typing import cast

import trio
from hypercorn.typing import ASGIFramework
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.errors import PeerError
from swarm.look.dashboard.reading import read_rollouts
from swarm.look.dashboard.watch import Feed, Watcher
from swarm.terminal.untrusted import printable
from swarm.transport.http.connections import serve_connections
from swarm.transport.http.local_server import is_addressed_as_loopback, url_of

WAITING_MAX = 16
"""Pages that wait until the rollouts for another one are read: each holds a connection."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

PUBLIC_HEADERS = {
    **HEADERS,
    "content-security-policy": POLICY.replace("frame-ancestors 'none'", "frame-ancestors *"),
    "cross-origin-resource-policy": "cross-origin",
    "access-control-allow-origin": "*",
    "cache-control": "public, max-age=2",
}
"""Of a public page: a website may show it in a frame, read its figures, and keep copies of it."""

REREAD_SECONDS = 30.0
"""How long a public page's rollouts are kept: reading them takes a process and seconds."""

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

NAMES = (
    *("page.css", "page.js", "dom.js", "charts.js", "broadcast.js", "peers.js", "rollouts.js"),
    *("sections.js", "stream.js", "uPlot.iife.min.js", "uPlot.min.css"),
)
PARTS = {"/": "page.html", **{f"/{name}": name for name in NAMES}}


@dataclass(frozen=True)
class Dashboard:
    """Answers the browsers of one feed."""

    feed: Feed
    watcher: Watcher | None = None
    """Knows the home whose rollouts can be read; None: there are none to read."""
    tokens: frozenset[str] = frozenset()
    """Empty: none is needed, and only the names of this machine are answered to unless `public`."""
    public: bool = False
    """Whether anybody may read the page, on any site."""
    _kept: list[tuple[float, Response]] = field(default_factory=list)
    """A public page's rollouts, and until when they are kept."""
    _reading: trio.Lock = field(default_factory=trio.Lock)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                *(Route(path, _part(name), methods=["GET"]) for path, name in PARTS.items()),
                Route("/snapshot.json", self._snapshot),
                Route("/rollouts.json", self._rollouts),
                Route("/favicon.ico", Response(status_code=204), methods=["GET"]),
            ],
            middleware=[Middleware(Door, tokens=self.tokens, public=self.public)],
        )

    async def _snapshot(self, request: Request) -> Response:
        headers = {"etag": f'"{id(self.feed):x}-{self.feed.version}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        body = self.feed.encoded()
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            body = self.feed.packed()
        return Response(body, media_type="application/json", headers=headers)

    async def _rollouts(self, request: Request) -> Response:
        step, watcher = request.query_params.get("step", ""), self.watcher
        if watcher is None or watcher.home is None:
            return PlainTextResponse("no rollouts can be read here", 404)
        if step and not (step.isascii() and step.isdecimal() and len(step) < 16):
            return PlainTextResponse("step must be a number, or empty for the newest", 400)
        if step and self.public:
            return PlainTextResponse("a public page has the newest rollouts only", 403)
        if self._reading.statistics().tasks_waiting >= WAITING_MAX:
            return PlainTextResponse("many pages are waiting for rollouts; ask again later", 503)
        async with self._reading:
            if self._kept and trio.current_time() < self._kept[0][0]:
                return self._kept[0][1]
            try:
                number = int(step) if step else None
                found = await read_rollouts(watcher.home, watcher.run.id, number)
                answer = Response(found, media_type="application/json")
            except PeerError as error:
                answer = PlainTextResponse(printable(str(error)), 503)
            if self.public:
                self._kept[:] = [(trio.current_time() + REREAD_SECONDS, answer)]
        return answer


def _part(name: str) -> ASGIApp:
    kind = TYPES[name.rpartition(".")[2]]
    return Response(files(__package__).joinpath(name).read_bytes(), media_type=kind)


class Door:
    """ASGI middleware: checks token and host, and sets the security headers of every answer."""

    def __init__(self, app: ASGIApp, tokens: frozenset[str], *, public: bool) -> None:
        self._app, self._tokens, self._public = app, tokens, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(PUBLIC_HEADERS if self._public else HEADERS)
            await send(message)

        refusal = None if self._public else self._refusal(Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers) -> Response | None:
        if _is_asked_by_another_site(headers):
            return PlainTextResponse("another site may link to this page, and ask nothing", 403)
        if self._tokens:
            if self._allows(headers.get("authorization", "")):
                return None
            return PlainTextResponse(
                "the token is missing or wrong: give it as the password, with any name",
                401,
                headers={"www-authenticate": 'Basic realm="swarm dashboard"'},
            )
        if not is_addressed_as_loopback(headers.get("host", "")):
            return PlainTextResponse(
                "a dashboard without a token answers to 127.0.0.1, [::1] and localhost only", 403
            )
        return None

    def _allows(self, authorization: str) -> bool:
        """Whether a header has a token: as a bearer, or as the password that a browser asks for."""
        scheme, _, given = authorization.partition(" ")
        token = given.strip().encode("latin-1")  # as it came
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return any([hmac.compare_digest(each.encode(), token) for each in self._tokens])


def _is_asked_by_another_site(headers: Headers) -> bool:
    """Whether a browser says that a page of another site asks.

    It could not read the answer, but could fill the streams and ask what costs much. A link to the
    page may stand anywhere."""
    other = headers.get("sec-fetch-site", "") in ("cross-site", "same-site")
    return other and headers.get("sec-fetch-dest", "") != "document"


async def serve(
    dashboard: Dashboard,
    listener: socket.socket,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; starts with the page's URL."""
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_connections, cast(ASGIFramework, dashboard.app()), listener)
        task_status.started(url_of(listener))
