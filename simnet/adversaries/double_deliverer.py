from __future__ import annotations

from dataclasses import replace

import msgspec
import trio
from blake3 import blake3

from peers.inference.delivery import Deliveries, Parcel
from peers.inference.outbox import Made
from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from simnet.compute.rollouts import SimulatedRollouts
from swarm.node.run_node import RunNode
from swarm.wire.envelope import STATE_LIFETIME_SECONDS
from swarm.wire.identity import PeerId


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
        made: Made,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        disk = self._node.disk
        rollouts = msgspec.msgpack.decode(await disk.read(made.path), type=SimulatedRollouts)
        raw = msgspec.msgpack.encode(msgspec.structs.replace(rollouts, variant=1))
        path = f"{made.path}.second"
        await disk.write(path, raw)
        second = msgspec.structs.replace(
            made.submission, digest=blake3(raw).digest(), size_bytes=len(raw)
        )
        last = self.ranked(made.submission, made.nonce)[-1]
        announced = await self._peer.seal(second, STATE_LIFETIME_SECONDS)
        await self.deliver(
            PeerId(last), Parcel(announced, replace(made, submission=second, path=path))
        )
        await super().see_through(made, task_status=task_status)


KIND = Kind(DoubleDeliverer, "inference")
