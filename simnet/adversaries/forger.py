from __future__ import annotations

from typing import cast

import msgspec

from simnet.adversaries.base import Adversary, Kind
from simnet.compute.policy import TOKENIZER, WEIGHTS
from simnet.disk import SimulatedDisk
from simnet.extents import Symbol
from swarm.shardcast.held import Held
from swarm.wire.messages import StepOrder


class Forger(Adversary):
    """Announces its own weights as the trainer's next policy, in the trainer's name, and orders
    work with them. *Caught*: bad signatures; its neighbours ban it."""

    async def attack(self) -> None:
        orders = [heard for heard in self._heard if isinstance(heard.message, StepOrder)]
        if not orders or not self._peer.store.complete():
            return
        order = cast(StepOrder, orders[-1].message)
        held = await self._make(order)
        trainer = self._peer.run.manifest.trainers[0].peer
        forged = msgspec.structs.replace(
            order, step=order.step + 1, revision=0, checkpoint=held.reference
        )
        self.push(await self.claim(trainer, forged))

    async def _make(self, order: StepOrder) -> Held:
        """Make a checkpoint of garbage that claims to be the next policy."""
        disk = cast(SimulatedDisk, self._peer.node.disk)
        folder = f"forged/{order.policy + 1}"
        if not disk.exists(folder):
            size = disk.size_bytes(f"{self._newest_folder()}/{WEIGHTS}")
            disk.put(f"{folder}/{WEIGHTS}", 0, Symbol("rubbish", 0, size))
            disk.put(f"{folder}/tokenizer.json", 0, TOKENIZER)
        held = self._peer.store.held((order.lineage, order.policy + 1))
        if held is not None:
            return held
        return await self._peer.store.publish(folder, order.lineage, order.policy + 1)

    def _newest_folder(self) -> str:
        held = self._peer.store.held(self._peer.store.complete()[-1])
        assert held is not None
        return held.folder


KIND = Kind(Forger, caught_by="gossip.neighbour_banned")
