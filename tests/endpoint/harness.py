"""A real endpoint on a port of the loopback interface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import trio

from peers.endpoint.app import Endpoint, EndpointLimits
from peers.endpoint.gate import Keys
from peers.endpoint.server import Options, make_endpoint, run_endpoint
from swarm.transport.http.local_server import open_listener


@dataclass
class Client:
    """Speaks JSON with an endpoint."""

    http: httpx.AsyncClient
    endpoint: Endpoint

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = await self.http.post(path, json=body, headers=names)
        return reply.status_code, reply.json()

    async def ok(self, path: str, body: Any, **headers: str) -> Any:
        status, found = await self.post(path, body, **headers)
        assert status == 200, found
        return found

    async def events(self, path: str, body: Any, **headers: str) -> list[Any]:
        """The events of a stream, the last one left out."""
        found = []
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.stream("POST", path, json=body, headers=names) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    found.append(line.removeprefix("data: "))
        assert found[-1] == "[DONE]"
        return [msgspec.json.decode(each) for each in found[:-1]]


@asynccontextmanager
async def serving(
    folder: Path,
    record: Path | None = None,
    keys: Keys = Keys(),  # noqa: B008 (frozen)
    **limits: Any,
) -> AsyncIterator[Client]:
    """An endpoint and its client."""
    options = Options(folder, "tiny", 3, "native", record=record, limits=EndpointLimits(**limits))
    endpoint = make_endpoint(options, keys)
    urls: list[str] = []
    started = trio.Event()

    def note(url: str) -> None:
        urls.append(url)
        started.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_endpoint, endpoint, open_listener("127.0.0.1:0"), note)
        with trio.fail_after(20):
            await started.wait()
        async with httpx.AsyncClient(base_url=urls[0], timeout=20, trust_env=False) as http:
            yield Client(http, endpoint)
        nursery.cancel_scope.cancel()
