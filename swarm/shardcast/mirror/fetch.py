"""Fetching a checkpoint from mirrors into a folder."""

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import trio

from swarm.errors import DECODE_ERRORS, UserError
from swarm.events import Events
from swarm.shardcast import limits
from swarm.shardcast.fetch.fetcher import Fetcher
from swarm.shardcast.held import Held
from swarm.shardcast.manifest import is_mirror
from swarm.shardcast.mirror import folder
from swarm.shardcast.store import CheckpointStore
from swarm.transport import Arrived, BlobReference, BlobTransport, FetchError, Source, Traffic
from swarm.transport.http.client import BulkClient
from swarm.wire.identity import Identity, PeerId
from swarm.wire.messages import Checkpoint
from swarm.world import Sink
from swarm.world.disk import LocalDisk
from swarm.world.machine import Machine

INDEX_BYTES_MAX = 64 * 1024
"""Largest `checkpoint.json` of a mirror."""


class MirrorTransport(BlobTransport):
    """Fetches from mirrors, each a source with one address, by HTTP without an identity."""

    def __init__(self, disk: LocalDisk) -> None:
        self.peer_id = PeerId("")
        self._client = BulkClient(Identity(os.urandom(32)), disk, lambda: b"", Traffic())

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        await self._client.fetch_run(source.addresses[0], None, wanted, arrived)

    def round_trip_seconds(self, source: Source) -> float:
        return self._client.round_trip_seconds(source.addresses)

    async def first_index(self, roots: Sequence[str]) -> tuple[str, folder.Index]:
        """The first mirror to answer, its `checkpoint.json`. Raises `FetchError`, `UserError`."""
        reasons = []
        for root in roots:
            base = root.rstrip("/")
            try:
                raw = await self._client.document(base, "/" + folder.INDEX, INDEX_BYTES_MAX)
            except FetchError as error:
                reasons.append(str(error).rstrip())
                continue
            try:
                return root, msgspec.json.decode(raw, type=folder.Index)
            except DECODE_ERRORS as error:
                raise UserError(
                    f"{base}/{folder.INDEX} describes no checkpoint: {error}"
                ) from error
        raise FetchError(
            f"{'; '.join(reasons)}; give the address of a mirror: what serves the files that "
            "`swarm checkpoint export` wrote"
        )

    def close(self) -> None:
        self._client.close()


async def fetch(
    out: Path,
    *,
    mirrors: Sequence[str],
    manifest_digest: bytes | None = None,
    deadline_seconds: float = limits.CHECKPOINT_DEADLINE_SECONDS,
    progress: folder.Progress = lambda done, total: None,
) -> Held:
    """Fetch a checkpoint from mirrors into the folder `out`; resumes an interrupted fetch.

    An adapter's base is fetched into a folder in `out`. The first mirror to answer names the
    manifest; its digest must be `manifest_digest`, if given. Raises `UserError`, `DeadlineError`,
    `BadManifest`, `FetchError`."""
    folder.check_out(out)
    for mirror in mirrors:
        if not is_mirror(mirror):
            raise UserError(f"{mirror!r} is no http:// or https:// address")
    with folder.writing(out) as disk, closing(MirrorTransport(disk)) as transport:
        said_by, index = await transport.first_index(mirrors)
        checkpoint = index.checkpoint()
        if manifest_digest is not None and checkpoint.reference.digest != manifest_digest:
            raise UserError(
                f"{said_by} has the checkpoint with manifest {index.manifest[:12]}…, not "
                f"--digest {manifest_digest.hex()[:12]}…; give another address, or the "
                "digest of what is to be fetched"
            )
        world = Machine()
        events = Events(world, "fetch")
        store = CheckpointStore(disk, index.run, events)
        store.watch(folder.watcher(progress))
        await store.recover()
        sources = [Source(addresses=(mirror.rstrip("/"),)) for mirror in mirrors]
        fetcher = Fetcher(world, transport, store, events)
        ends_at = trio.current_time() + deadline_seconds
        await fetcher.fetch(checkpoint, lambda: sources, deadline_seconds=deadline_seconds)
        held = store.held((checkpoint.lineage, checkpoint.step))
        assert held is not None
        if held.manifest.base is not None:
            await fetcher.fetch(
                Checkpoint(reference=held.manifest.base, total_bytes=0),
                lambda: sources,
                deadline_seconds=max(0.0, ends_at - trio.current_time()),
            )
        await folder.move_out(disk, held, out, store.base_of(held))
        return held
