from __future__ import annotations

from typing import Any, cast

from peers.relay import RelayRole
from simnet.adversaries.base import Kind, beside
from swarm.node.run_node import RunNode
from swarm.shardcast.have.messages import PROTOCOL as HAVE
from swarm.shardcast.have.messages import Complete, encode
from swarm.transport import BlobReference, OpenBlob, Refused, StreamError
from swarm.wire.identity import PeerId


class EquivocatingRelay(RelayRole):
    """Claims to hold every piece, and serves none. *Caught*: a source that claims a piece and
    refuses it has failed, and is asked ever more rarely."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        bulk = cast(Any, peer.node.transport)
        self._honest = bulk._service
        bulk._service = self

    def admits(self, peer: PeerId | None, credential: bytes) -> bool:
        return bool(self._honest.admits(peer, credential))

    def open(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        raise Refused(404, "not yet")

    def accept(self, client: PeerId | None, reference: BlobReference) -> Any:
        raise Refused(403, "this peer accepts no pushed blobs")

    async def run(self) -> None:
        await beside(super().run, self._boast)

    async def _boast(self) -> None:
        newest, transport = self._peer.newest_checkpoint(), self._peer.node.transport
        if newest is None:
            return
        claim = encode([Complete(newest.reference.digest)])
        for peer in transport.connected():
            try:
                await (await transport.open_stream(peer, HAVE)).send(claim)
            except StreamError:
                continue


KIND = Kind(EquivocatingRelay, caught_by="shardcast.piece_refused")
