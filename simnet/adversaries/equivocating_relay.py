from __future__ import annotations

from typing import Any, cast

import trio

from peers.relay import RelayRole
from simnet.adversaries.base import ATTACK_SECONDS, Kind
from swarm.identity import PeerId
from swarm.node.run_node import RunNode
from swarm.shardcast.have.messages import PROTOCOL as HAVE
from swarm.shardcast.have.messages import Complete, encode
from swarm.transport import BlobReference, OpenBlob, Refused, StreamError


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
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            while True:
                await trio.sleep(ATTACK_SECONDS)
                newest = self._peer.newest_checkpoint()
                if newest is not None:
                    await self._boast(newest.reference.digest)

    async def _boast(self, manifest: bytes) -> None:
        transport = self._peer.node.transport
        for peer in transport.connected():
            try:
                stream = await transport.open_stream(peer, HAVE)
                await stream.send(encode([Complete(manifest)]))
            except StreamError:
                continue


KIND = Kind(EquivocatingRelay, caught_by="shardcast.piece_refused")
