"""A bootstrap peer that is there and has no room for a newcomer, on real sockets."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET

import pytest
import trio

from swarm.events import Event
from swarm.node import joining
from swarm.node.joining import join_network
from swarm.node.local import open_node
from swarm.node.node import Node
from swarm.settings import PeerSettings

pytestmark = pytest.mark.wall_clock

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for a close with a reset."""


class Door:
    """Closes the first connections at once, as a peer without room does, and passes the others on
    to `port`. The kernel ends a connection with a reset if it holds unread bytes, else without."""

    def __init__(self, turns_away: int, *, resets: bool, port: int) -> None:
        self.came = 0
        self._turns_away = turns_away
        self._resets = resets
        self._port = port

    async def __call__(self, stream: trio.SocketStream) -> None:
        self.came += 1
        if self.came <= self._turns_away:
            if self._resets:
                stream.setsockopt(SOL_SOCKET, SO_LINGER, RESET)
            await stream.aclose()
            return
        async with (
            await trio.open_tcp_stream("127.0.0.1", self._port) as behind,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._carry, stream, behind, nursery.cancel_scope)
            nursery.start_soon(self._carry, behind, stream, nursery.cancel_scope)

    @staticmethod
    async def _carry(
        source: trio.SocketStream, target: trio.SocketStream, scope: trio.CancelScope
    ) -> None:
        with suppress(trio.BrokenResourceError):  # either side may end with a reset
            async for data in source:
                await target.send_all(data)
        scope.cancel()


@asynccontextmanager
async def address_of(door: Door, peer: str) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, door, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        yield f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def peer(home: Path, role: str, *bootstrap: str) -> AsyncIterator[tuple[Node, list[Event]]]:
    settings = PeerSettings(
        role=[role],
        bootstrap=list(bootstrap),
        listen=["/ip4/127.0.0.1/tcp/0"],
        home=str(home),
    )
    events: list[Event] = []
    async with open_node(settings, events_sink=events.append) as node:
        yield node, events


def said(events: list[Event], name: str) -> int:
    return sum(event.name == name for event in events)


@pytest.mark.parametrize("resets", [False, True])
async def test_a_newcomer_without_room_waits_for_its_turn(
    resets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "DIAL_AGAIN_SECONDS", 0.01)
    async with peer(tmp_path / "b", "bootstrap") as (bootstrap, _):
        port = int(bootstrap.transport.addresses()[0].split("/")[4])
        door = Door(5, resets=resets, port=port)
        async with (
            address_of(door, bootstrap.peer_id) as address,
            peer(tmp_path / "p", "inference", address) as (node, events),
        ):
            assert list(await join_network(node)) == [bootstrap.peer_id]
            assert door.came == 6
            assert said(events, "dht.bootstrap_full") == 1, "it is told once"
            assert said(events, "dht.bootstrap_silent") == 1
