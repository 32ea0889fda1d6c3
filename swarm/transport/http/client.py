"""The piece client: fetches and pushes over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from swarm.transport import Arrived, BlobReference, FetchError, Traffic
from swarm.transport.http import limits
from swarm.transport.http.pace import Broken, Uplink
from swarm.transport.http.pool import Pool
from swarm.wire.identity import Identity, PeerId
from swarm.world import Disk, Sink

log = logging.getLogger(__name__)


class BulkClient:
    """Fetches and pushes on kept-alive connections.

    A root is an `http://host:port` address; the peer behind it is None for a mirror. Every method
    raises `FetchError`, and `Unreachable` when no connection was made within `connect_seconds`.
    """

    def __init__(
        self,
        identity: Identity,
        disk: Disk,
        credential: Callable[[], bytes],
        traffic: Traffic,
        uplink: Uplink | None = None,
    ) -> None:
        """`uplink` limits the rate of pushes; None: no limit."""
        self._uplink = uplink or Uplink()
        self._disk = disk
        self.pool = Pool(identity, credential, traffic)

    async def fetch_run(
        self,
        root: str,
        peer: PeerId | None,
        wanted: Sequence[tuple[BlobReference, Sink]],
        arrived: Arrived,
        *,
        connect_seconds: float = limits.CONNECT_SECONDS,
    ) -> None:
        """GET several blobs on one connection. `Unreachable` is raised only before the first.

        All are requested at once from a peer, but one after the other from a mirror, since some
        mirrors mishandle pipelined requests.
        """
        async with self.pool.connection(root, peer, connect_seconds) as connection:
            if peer is not None:
                await connection.request_blobs([reference.digest for reference, _ in wanted])
            for reference, sink in wanted:
                if peer is None:
                    await connection.request_blobs([reference.digest])
                await arrived(await connection.receive_blob(reference, sink))

    async def document(self, root: str, path: str, bytes_max: int) -> bytes:
        """GET a small document from a mirror."""
        async with self.pool.connection(root, None, limits.CONNECT_SECONDS) as connection:
            await connection.request(b"GET", path)
            status, size = await connection.response()
            if status != 200:
                raise await connection.refusal(status, size)
            if size > bytes_max:
                raise FetchError(f"{root}{path} has {size} bytes, more than {bytes_max}")
            return await connection.small_answer(size, bytes_max)

    async def push(
        self,
        root: str,
        peer: PeerId | None,
        reference: BlobReference,
        path: str,
        *,
        connect_seconds: float = limits.CONNECT_SECONDS,
    ) -> None:
        """PUT the local file `path`."""
        size = self._disk.size_bytes(path)
        if size != reference.size_bytes:
            raise FetchError(f"{path} has {size} bytes, not {reference.size_bytes}")
        async with self.pool.connection(root, peer, connect_seconds) as connection:
            headers = [(b"content-length", b"%d" % size), (b"expect", b"100-continue")]
            await connection.request(b"PUT", f"/blob/{reference.digest.hex()}", headers)
            status, length = await connection.response()
            if status == 100:
                file = self._disk.local_path(path)
                try:
                    await connection.wire.send_file(file, 0, size, self._uplink)
                except Broken as broken:
                    # The target may have sent a reason before it closed; if not, `response` raises.
                    log.debug("%s %s", root, broken)
                    connection.ends = True
                status, length = await connection.response()
            else:
                connection.ends = True  # the server may still wait for the body
            if status not in (200, 201, 204):
                raise await connection.refusal(status, length)
            await connection.small_answer(length)
