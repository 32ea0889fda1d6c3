"""The bulk service of a peer, shared by all its roles: what others may fetch and push.

It serves pieces and manifests of checkpoints in the store, and blobs that a role registered (for
example a submission). Each is named by its hash, never by a path."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from swarm.shardcast.store import CheckpointStore
from swarm.shardcast.uploads import Uploads
from swarm.transport import BlobReference, OpenBlob, Refused
from swarm.wire.identity import PeerId
from swarm.world import Sink

Admits = Callable[[PeerId | None, bytes], bool]
"""(peer, credential) → whether the peer may use the bulk plane: the run's membership decides."""


class PushInbox(Protocol):
    """Decides on pushes; a validator's inbox accepts submissions."""

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        """See `BulkService.accept`."""


@dataclass(eq=False)
class BlobService:
    """Implements `swarm.transport.BulkService` over a checkpoint store and registered blobs."""

    _admits: Admits
    store: CheckpointStore | None = None
    uploads: Uploads | None = None
    inbox: PushInbox | None = None
    """Decides on pushes; a role sets it while it accepts them. None: pushes are refused."""
    _registered: dict[bytes, OpenBlob] = field(default_factory=dict)

    def register(self, digest: bytes, path: str, offset: int, size_bytes: int) -> None:
        """Serve a range of a file on this peer's disk under its hash, until `unregister`."""
        self._registered[digest] = OpenBlob(path, offset, size_bytes)

    def unregister(self, digest: bytes) -> None:
        """Stop serving a blob; the caller may then remove the file. Silent when unknown."""
        self._registered.pop(digest, None)

    def admits(self, peer: PeerId | None, credential: bytes) -> bool:
        return self._admits(peer, credential)

    def open(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        """Open a blob to send. Raises `Refused`: 404 ("not yet" for a piece still missing here),
        and 503 when `uploads` is busy."""
        blob = self._registered.get(digest)
        if blob is None and self.store is not None:
            blob = (self.uploads or self.store.blobs).open(digest)
            if blob is None and self.store.blobs.of(digest):
                raise Refused(404, "not yet")
        if blob is None:
            raise Refused(404, "unknown blob")
        return blob

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        if self.inbox is None:
            raise Refused(503, "this peer does not accept submissions (yet)")
        return self.inbox.accept(client, reference)
