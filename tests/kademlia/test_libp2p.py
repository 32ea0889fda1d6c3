"""The same DHT over real sockets."""

from __future__ import annotations

import contextlib
from typing import cast

import pytest
import trio

from swarm.kademlia.dht import Kademlia
from swarm.kademlia.providers import provider_key
from swarm.transport.libp2p import open_libp2p
from swarm.wire.identity import Identity
from swarm.world import Disk
from tests.kademlia.harness import PlainValidator, good
from tests.worlds import VirtualWorld

pytestmark = pytest.mark.wall_clock

KEY = b"/swarm-run/alice/first"


async def test_records_providers_and_peers_over_libp2p():
    async with trio.open_nursery() as nursery, contextlib.AsyncExitStack() as stack:
        peers = []
        for number in range(4):
            world = VirtualWorld(number)
            transport = await stack.enter_async_context(
                open_libp2p(
                    Identity(bytes([number + 1]) * 32),
                    ["/ip4/127.0.0.1/tcp/0"],
                    world=world,
                    disk=cast(Disk, None),
                )
            )
            dht = Kademlia(transport, world, {"swarm-run": PlainValidator()})
            await nursery.start(dht.run)
            peers.append((transport, dht))
        first, second, third, fourth = (dht for _, dht in peers)
        with trio.fail_after(30):
            for dht in (second, third, fourth):
                await dht.bootstrap(peers[0][0].addresses())
            value = good(1, lifetime_seconds=1e9)  # a real clock starts anywhere
            assert await second.put(KEY, value) == 4
            assert await fourth.get(KEY) == value
            assert await third.provide(provider_key(bytes(32))) == 4
            found = await first.find_providers(provider_key(bytes(32)))
            assert [neighbour.peer for neighbour in found] == [third.peer_id]
            assert await second.find_peer(fourth.peer_id) == tuple(peers[3][0].addresses())
        nursery.cancel_scope.cancel()
