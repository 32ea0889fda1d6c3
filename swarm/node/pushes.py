"""What a peer accepts when others push files to it."""

from __future__ import annotations

from swarm.identity import PeerId
from swarm.shardcast.service import PushPolicy
from swarm.transport import (
    BlobReference,
    Refused,
)
from swarm.world import Piece, Sink


class Pushes:
    """What this peer accepts when others push: nothing, until a role says so."""

    def __init__(self) -> None:
        self.policy: PushPolicy | None = None

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        return self._policy().accept(client, reference)

    async def received(
        self, client: PeerId | None, reference: BlobReference, sink: Sink, piece: Piece
    ) -> None:
        await self._policy().received(client, reference, sink, piece)

    def _policy(self) -> PushPolicy:
        if self.policy is None:
            raise Refused(503, "this peer takes no submissions, or not yet")
        return self.policy
