from __future__ import annotations

from typing import Any

import msgspec

from simnet.adversaries.base import Adversary, Kind
from swarm.wire.envelope import STATE_LIFETIME_SECONDS
from swarm.wire.messages import PeerRecord


class Replayer(Adversary):
    """Replays old messages of trusted peers, and sends its own messages dated in the future or of
    another run. *Harmless*: dropped as old state, issued in the future, or wrong run."""

    async def attack(self) -> None:
        record = PeerRecord(roles=["relay"], addresses=[])
        mine = await self._peer.seal(record, STATE_LIFETIME_SECONDS)
        ahead = msgspec.structs.replace(mine.body, issued_ms=mine.body.issued_ms + 10**7)
        other = msgspec.structs.replace(mine.body, run="somebody/else")
        mine_again = [self._sign(body) for body in (ahead, other)]
        self.push(*(heard.raw for heard in self._heard[:10]), *mine_again)

    def _sign(self, body: Any) -> bytes:
        encoded = msgspec.msgpack.encode(body)
        signed = f"swarm/1/{body.kind}\0".encode() + encoded
        return self._peer.node.identity.sign(signed) + encoded


KIND = Kind(Replayer)
