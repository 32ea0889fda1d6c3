from __future__ import annotations

import trio

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind, beside
from swarm.errors import PeerError
from swarm.wire.envelope import STATE_LIFETIME_SECONDS
from swarm.wire.identity import PeerId
from swarm.wire.messages import Submission

AT_ONCE = 20
EVERY_SECONDS = 1.0


class VerdictFlooder(InferenceRole):
    """Announces invented files all the time, to have refusals signed, logged and gossiped.
    *Harmless*: a refused announcement enters no log and no gossip, and answers have a quota."""

    async def run(self) -> None:
        await beside(super().run, self._flood, EVERY_SECONDS)

    async def _flood(self) -> None:
        order, lease = self._peer.step_order(), self._peer.lease
        if order is None or lease is None or lease.admission is None:
            return
        async with trio.open_nursery() as nursery:
            for validator in self._run.manifest.validator_ids():
                for _ in range(AT_ONCE):
                    invented = Submission(
                        lineage=order.lineage,
                        step=order.step,
                        policy=order.policy,
                        number=self._node.world.secret_bytes(1)[0],
                        digest=self._node.world.secret_bytes(32),
                        size_bytes=1000,
                        groups=self._run.manifest.sampling.groups_per_submission,
                        run_digest=order.run_digest,
                        entry=self._peer.entry,
                    )
                    nursery.start_soon(self._announce, PeerId(validator), invented)

    async def _announce(self, validator: PeerId, invented: Submission) -> None:
        lease = self._peer.lease
        shown = [lease.admission] if lease is not None and lease.admission is not None else []
        envelope = await self._peer.seal(invented, STATE_LIFETIME_SECONDS)
        try:
            await self._peer.messenger.request(validator, envelope, *shown, deadline_seconds=5.0)
        except PeerError:
            return


KIND = Kind(VerdictFlooder, "inference")
