"""Limits that protect a bulk server from its clients, each with a bystander who must not suffer;
real sockets on loopback."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AsyncExitStack

import pytest
import trio

from swarm.transport import BlobReference, FetchError
from swarm.transport.http import server
from swarm.wire.identity import Identity

from .harness import ALICE, BOB, CAROL, Service, Sink
from .test_http import ask, challenge, client_of, dial, fetch, get, prove, serving

pytestmark = pytest.mark.wall_clock

UNKNOWN = BlobReference(b"?" * 32, 1)
SLOW = 0.3
"""Seconds that nobody waits by chance, and a flooder longer."""


@pytest.fixture
def few_small_requests(monkeypatch) -> None:
    """Four at once, then one in half a second."""
    monkeypatch.setattr(server, "SMALL_REQUESTS_PER_SECOND", 2.0)
    monkeypatch.setattr(server, "SMALL_REQUESTS_BURST", 4.0)


async def seconds(question: Awaitable[bytes]) -> float:
    began = trio.current_time()
    await question
    return trio.current_time() - began


async def is_slow(stream: trio.SocketStream) -> bool:
    return await seconds(ask(stream, get(UNKNOWN))) > SLOW


async def test_a_flood_from_one_address_slows_no_other_address(disk, few_small_requests) -> None:
    async with (
        serving(Service(), disk) as root,
        await dial(root) as flooder,
        await dial(root) as beside,
        await dial(root, "127.0.0.2") as other,
    ):
        for _ in range(5):
            assert b"404" in await ask(flooder, get(UNKNOWN))
        assert await is_slow(beside), "one address is one, on however many connections"
        assert not await is_slow(other)


async def test_a_flood_of_one_peer_slows_it_at_every_address_and_no_other_peer(
    disk, few_small_requests
) -> None:
    service = Service()
    service.admitted = {ALICE.peer_id, CAROL.peer_id}

    async with AsyncExitStack() as stack:
        root = await stack.enter_async_context(serving(service, disk))

        async def proven(host: str, identity: Identity) -> trio.SocketStream:
            stream = await stack.enter_async_context(await dial(root, host))
            assert b" 204 " in await prove(stream, identity)
            return stream

        # Two at each address: together too many, but for no address.
        for number in range(2, 5):
            stream = await proven(f"127.0.0.{number}", ALICE)
            for _ in range(2 if number < 4 else 1):
                assert not await is_slow(stream)
        there = await proven("127.0.0.5", ALICE)
        other = await proven("127.0.0.6", CAROL)
        assert await is_slow(there)
        assert not await is_slow(other)


async def test_a_server_that_takes_no_more_connections_is_busy_to_a_client(
    disk, monkeypatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 1)
    service = Service()
    data = b"a" * 1000
    reference = service.offer(disk, data)
    async with serving(service, disk) as root, client_of(disk) as client:
        async with await dial(root) as only:
            await challenge(only)
            with pytest.raises(FetchError, match="503") as refused:
                await fetch(client, root, BOB.peer_id, reference, Sink(len(data)))
            assert refused.value.busy
        await fetch(client, root, BOB.peer_id, reference, Sink(len(data)))
