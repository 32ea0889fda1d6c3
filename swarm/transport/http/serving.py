"""The parts of a piece server that HTTP and streams share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swarm.transport import BlobReference, BulkService, Refused, Traffic
from swarm.transport.http.pace import Uplink
from swarm.wire.identity import PeerId
from swarm.world import Disk, Sink


class FinalRefusal(Refused):
    """A refusal after which an HTTP connection ends."""


@dataclass(frozen=True)
class Serving:
    """The objects that every answer of one peer's piece plane needs."""

    peer_id: PeerId
    disk: Disk
    get_service: Callable[[], BulkService | None]
    traffic: Traffic = field(default_factory=Traffic)
    uplink: Uplink = field(default_factory=Uplink)
    """Limits the rate of all blobs sent."""
    trusts: Callable[[PeerId], bool] = lambda peer: False
    """Whether a peer is trusted, so that admitted peers cannot take its connections."""
    pages: Mapping[bytes, bytes] = field(default_factory=dict)
    """Small documents by path, served to every client; only over HTTP."""

    def service(self) -> BulkService:
        service = self.get_service()
        if service is None:
            raise Refused(404, "this peer serves no blobs")
        return service


async def commit_push(reference: BlobReference, sink: Sink) -> None:
    """Check a pushed blob and commit it. Raises `Refused`."""
    piece = sink.finish()
    if not piece.verify(reference.digest):
        raise Refused(422, "the bytes have another hash")
    await sink.commit(piece)
