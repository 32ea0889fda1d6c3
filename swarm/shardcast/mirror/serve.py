"""Serving a folder as a mirror, without copying it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from swarm.errors import UserError
from swarm.identity import PeerId
from swarm.shardcast.mirror.describe import describe
from swarm.shardcast.mirror.index import INDEX, Index, index_of
from swarm.shardcast.service import BlobService
from swarm.transport.http.pace import Uplink
from swarm.transport.http.server import BulkServer
from swarm.transport.http.serving import Serving
from swarm.world.disk import LocalDisk


async def serve(
    folder: Path,
    *,
    host: str,
    port: int,
    run: str | None = None,
    lineage: int | None = None,
    step: int | None = None,
    uplink_bytes_per_second: float | None = None,
    ready: Callable[[int, Index], None] = lambda port, index: None,
) -> None:
    """Serve a folder as a mirror to all clients until cancelled, without copying it.

    Calls `ready` with the port and the index once it listens. Raises `UserError`.
    """
    manifest, blob = await describe(folder, run=run, lineage=lineage, step=step)
    index = index_of(manifest, blob)
    disk = LocalDisk(folder)
    service = BlobService(lambda peer, credential: True)
    for piece in manifest.pieces:
        name = manifest.files[piece.file].name
        service.register(piece.digest, name, piece.offset, piece.size_bytes)
    pages = {
        b"/" + INDEX.encode(): msgspec.json.encode(index),
        b"/blob/" + index.manifest.encode(): blob,
    }
    server = BulkServer(
        Serving(
            peer_id=PeerId(""),
            disk=disk,
            get_service=lambda: service,
            uplink=Uplink(uplink_bytes_per_second),
            pages=pages,
        )
    )
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise UserError(
            f"cannot listen on {host or repr(host)} port {port} ({why}); choose another --port or "
            "--host"
        ) from error
    ready(listeners[0].socket.getsockname()[1], index)
    await server.serve(listeners)
