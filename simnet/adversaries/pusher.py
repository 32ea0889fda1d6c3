from __future__ import annotations

import trio
from blake3 import blake3

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind, beside
from swarm.errors import PeerError
from swarm.transport import BlobReference, Source
from swarm.wire.identity import PeerId

SIZE_BYTES = 1 << 20
AT_ONCE = 10


class Pusher(InferenceRole):
    """Pushes files that it never announces, ten at once. *Harmless*: an identity may have eight
    unjudged files, and one that is not announced is removed after a minute."""

    async def run(self) -> None:
        await beside(super().run, self._push)

    async def _push(self) -> None:
        async with trio.open_nursery() as nursery:
            for validator in self._run.manifest.validator_ids():
                for number in range(AT_ONCE):
                    nursery.start_soon(self._push_one, validator, number)

    async def _push_one(self, validator: str, number: int) -> None:
        raw = self._node.world.secret_bytes(32) + bytes(SIZE_BYTES)
        path = f"pushed/{number}-{validator}"
        await self._node.disk.write(path, raw)
        record = self._node.record(validator)
        addresses = tuple(record.bulk_addresses) if record else ()
        try:
            await self._node.transport.push(
                Source(PeerId(validator), addresses),
                BlobReference(blake3(raw).digest(), len(raw)),
                path,
            )
        except PeerError:
            return


KIND = Kind(Pusher, "inference")
