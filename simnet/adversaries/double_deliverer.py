from __future__ import annotations

import msgspec
import trio
from blake3 import blake3

from peers.inference.delivery import Deliveries, Parcel
from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from simnet.compute.rollouts import SimulatedRollouts
from swarm.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.identity import PeerId
from swarm.messages import Submission
from swarm.node.run_node import RunNode
from swarm.transport import BlobReference


class DoubleDeliverer(InferenceRole):
    """Sends the last validator in rank a second file under every number. It differs in rounding,
    so that it hashes differently and passes every check. *Harmless*: a trainer takes one file per
    number, and only that file is credited."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._deliveries = DoubleDeliveries(peer)


class DoubleDeliveries(Deliveries):
    """The deliveries of a `DoubleDeliverer`."""

    async def see_through(
        self,
        submission: Submission,
        nonce: bytes,
        path: str,
        ordered: Envelope | None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        disk = self._node.disk
        rollouts = msgspec.msgpack.decode(await disk.read(path), type=SimulatedRollouts)
        raw = msgspec.msgpack.encode(msgspec.structs.replace(rollouts, variant=1))
        await disk.write(f"{path}.second", raw)
        digest = blake3(raw).digest()
        second = msgspec.structs.replace(submission, digest=digest, size_bytes=len(raw))
        last = self.ranked(submission, nonce)[-1]
        announced = await self._peer.seal(second, STATE_LIFETIME_SECONDS)
        reference = BlobReference(digest, len(raw))
        await self.deliver(PeerId(last), Parcel(announced, reference, f"{path}.second", ordered))
        await super().see_through(submission, nonce, path, ordered, task_status=task_status)


KIND = Kind(DoubleDeliverer, "inference")
