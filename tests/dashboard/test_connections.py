"""The page's connections: none that lets the server wait keeps others out, or holds up its end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
import trio

from swarm.look.dashboard.server import Dashboard, serve
from swarm.look.dashboard.snapshot import Snapshot
from swarm.look.dashboard.watch import Feed
from swarm.transport.http import connections
from swarm.transport.http.local_server import open_listener
from tests.dashboard.harness import example, serving

HALF = b"GET /snapshot.json HTTP/1.1\r\nHost: 127.0.0.1\r\n"
WHOLE = HALF + b"\r\n"

PROMPT_SECONDS = 10
"""Longer than anything here takes, and shorter than the deadlines that would end it anyway."""


def larger_than_all_buffers() -> Feed:
    found = example()
    return Feed(Snapshot(msgspec.structs.replace(found.head, trainer="x" * (32 << 20))))


@asynccontextmanager
async def connected(http: httpx.AsyncClient, sent: bytes) -> AsyncIterator[trio.SocketStream]:
    """A connection to the page on which some bytes were sent."""
    url = http.base_url
    async with await trio.open_tcp_stream(url.host, url.port or 80) as stream:
        await stream.send_all(sent)
        yield stream


@pytest.mark.parametrize("sent", [b"", HALF])
@pytest.mark.wall_clock
async def test_a_connection_without_a_whole_request_makes_way(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)
    async with (
        serving(Feed(example())) as http,
        connected(http, sent) as first,
        connected(http, sent) as second,
    ):
        with trio.fail_after(PROMPT_SECONDS):
            assert (await http.get("/")).status_code == 200
            assert await ended(first), "it had waited for longest"
            await second.send_all(WHOLE.removeprefix(sent))
            await until(second, b" 200 ")


@pytest.mark.wall_clock
async def test_a_client_that_reads_nothing_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)
    async with (
        serving(larger_than_all_buffers()) as http,
        connected(http, WHOLE) as first,
        connected(http, WHOLE) as second,
    ):
        for stream in (first, second):
            await until(stream, b" 200 ")
        with trio.fail_after(PROMPT_SECONDS):
            assert (await http.get("/")).status_code == 200


@pytest.mark.wall_clock
async def test_a_client_that_has_gone_counts_no_more() -> None:
    async with serving(Feed(example())) as http, connected(http, b"") as stream:
        await stream.send_eof()
        with trio.fail_after(PROMPT_SECONDS):
            assert await ended(stream)


@pytest.mark.wall_clock
async def test_a_client_that_reads_nothing_does_not_hold_up_the_end() -> None:
    async with trio.open_nursery() as nursery:
        listener = open_listener("127.0.0.1:0")
        url = await nursery.start(serve, Dashboard(larger_than_all_buffers()), listener)
        async with httpx.AsyncClient(base_url=url) as http, connected(http, WHOLE) as stream:
            await until(stream, b" 200 ")
            stopped_at = trio.current_time()
            nursery.cancel_scope.cancel()
    assert trio.current_time() - stopped_at < PROMPT_SECONDS


async def ended(stream: trio.SocketStream) -> bool:
    """Whether the server closes the connection without a word."""
    try:
        return await stream.receive_some() == b""
    except trio.BrokenResourceError:
        return True


async def until(stream: trio.SocketStream, words: bytes) -> bytes:
    """What arrives until it holds `words`."""
    found = b""
    with trio.fail_after(20):
        while words not in found:
            part = await stream.receive_some()
            assert part, found
            found += part
    return found
