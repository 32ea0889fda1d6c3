from __future__ import annotations

from simnet.adversaries.base import Adversary, Kind
from swarm.shardcast.have.messages import PROTOCOL as HAVE
from swarm.transport import StreamError
from swarm.wire.envelope import STATE_LIFETIME_SECONDS
from swarm.wire.messages import PeerRecord

FLOOD_FRAMES = 200
"""Announcements in one burst."""


class Flooder(Adversary):
    """Sends hundreds of valid announcements at once, and opens streams without end. *Harmless*:
    senders' rates and streams are limited, and the run continues."""

    async def attack(self) -> None:
        record = PeerRecord(roles=["relay"], addresses=[])
        raws = [
            (await self._peer.seal(record, STATE_LIFETIME_SECONDS)).raw for _ in range(FLOOD_FRAMES)
        ]
        self.push(*raws)
        transport = self._peer.node.transport
        for peer in transport.connected():
            for _ in range(20):
                try:
                    await transport.open_stream(peer, HAVE)
                except StreamError:
                    break


KIND = Kind(Flooder)
