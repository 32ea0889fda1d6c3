"""The transport of a fetch from mirrors: HTTP without an identity."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from swarm.errors import DECODE_ERRORS, UserError
from swarm.identity import Identity, PeerId
from swarm.shardcast.mirror.index import INDEX, Index
from swarm.transport import Arrived, BlobReference, FetchError, Source
from swarm.transport.base import Traffic
from swarm.transport.http.client import BulkClient
from swarm.transport.http.heads import Unreachable
from swarm.world import Piece, Sink
from swarm.world.disk import LocalDisk

INDEX_BYTES_MAX = 64 * 1024
"""Largest `checkpoint.json` of a mirror."""


class MirrorTransport:
    """The part of a transport that fetching from mirrors needs."""

    def __init__(self, disk: LocalDisk) -> None:
        self.peer_id = PeerId("")
        self._client = BulkClient(Identity(os.urandom(32)), disk, lambda: b"", Traffic())

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        last = FetchError("a source has no address")
        for root in source.addresses:
            try:
                return await self._client.fetch(root, None, reference, sink)
            except Unreachable as error:
                last = error
        raise last

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        last = FetchError("a source has no address")
        for root in source.addresses:
            try:
                return await self._client.fetch_run(root, None, wanted, arrived)
            except Unreachable as error:
                last = error
        raise last

    def round_trip_seconds(self, source: Source) -> float:
        return self._client.pool.round_trip_seconds(source.addresses)

    async def first_index(self, roots: Sequence[str]) -> tuple[str, Index]:
        """The first mirror that answers, and its `checkpoint.json`.

        Raises `FetchError` or `UserError`.
        """
        reasons = []
        for root in roots:
            try:
                return root, await self.index(root)
            except FetchError as error:
                reasons.append(str(error).rstrip())
        raise FetchError(
            f"{'; '.join(reasons)}; give the address of a mirror: what serves the files that "
            "`swarm checkpoint export` wrote"
        )

    async def index(self, root: str) -> Index:
        """A mirror's `checkpoint.json`; raises `FetchError` or `UserError`."""
        root = root.rstrip("/")
        raw = await self._client.document(root, "/" + INDEX, INDEX_BYTES_MAX)
        try:
            return msgspec.json.decode(raw, type=Index)
        except DECODE_ERRORS as error:
            raise UserError(f"{root}/{INDEX} describes no checkpoint: {error}") from error

    def close(self) -> None:
        self._client.pool.close()
