"""Coming back after the machine was suspended, such as a laptop whose lid was closed."""

from __future__ import annotations

import trio

from swarm.errors import PeerError
from swarm.node.node import Node
from swarm.wire.identity import PeerId

TICK_SECONDS = 5.0

SLEPT_SECONDS = 60.0
"""A tick that took this much longer means that the machine slept. A busy machine delays a tick by
seconds; other peers drop a silent connection after about this time."""

DISCONNECT_SECONDS = 5.0


async def reconnect_after_sleep(node: Node) -> None:
    """Watch the clocks until cancelled; after a sleep, drop all connections.

    They are dead on the other side, and this side might wait minutes for an answer. The tasks that
    need peers then connect again: the lease, gossip and the fetches. What is newest comes with the
    first greeting, so older step orders are not followed any further. The monotonic clock stands
    still while Linux is suspended, so the wall clock counts too; a clock that is set ahead by hand
    looks like a sleep, and does no harm.
    """
    world = node.world
    while True:
        now, wall = world.now(), world.wall_time()
        await trio.sleep(TICK_SECONDS)
        slept = max(world.now() - now, world.wall_time() - wall) - TICK_SECONDS
        if slept < SLEPT_SECONDS:
            continue
        peers = list(node.transport.connected())
        node.events.emit("peer.woke", seconds=slept, connections=len(peers))
        with trio.move_on_after(DISCONNECT_SECONDS):
            async with trio.open_nursery() as nursery:
                for peer in peers:
                    nursery.start_soon(_disconnect, node, peer)


async def _disconnect(node: Node, peer: str) -> None:
    try:
        await node.transport.disconnect(PeerId(peer))
    except PeerError:
        return  # it is gone already
