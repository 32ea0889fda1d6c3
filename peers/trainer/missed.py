"""Verdicts that did not fit into a trainer's queue, read again from the validators' logs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from swarm.errors import PeerError
from swarm.ledger.client import open_ledger
from swarm.node.log_copies import RETRY_SECONDS
from swarm.node.run_node import RunNode
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Verdict
from swarm.world.observable import Observable


class MissedVerdicts:
    """Verdicts that did not fit into the queue, by validator and worker."""

    def __init__(self, peer: RunNode) -> None:
        self._node = peer.node
        self._run = peer.run
        self._missed: Observable[dict[tuple[str, str], int]] = Observable({})
        """First index to read in the validator's log, by (validator, worker)."""

    def __bool__(self) -> bool:
        return bool(self._missed.value)

    def miss(self, validator: str, worker: str, index: int) -> None:
        """Schedule reading a worker's verdicts in a validator's log, from `index` on."""
        earlier = self._missed.value.get((validator, worker), index)
        self._missed.value[validator, worker] = min(earlier, index)
        self._missed.touch()

    async def run(self, hear: Callable[[Envelope], Awaitable[None]]) -> None:
        """Hand every missed verdict to `hear`, until cancelled."""
        while True:
            missed = await self._missed.wait_until(bool)
            (validator, worker), start = next(iter(missed.items()))
            del missed[validator, worker]
            try:
                await self._node.reach(PeerId(validator))
                async with open_ledger(self._node.transport, PeerId(validator)) as client:
                    page = await client.verdicts(worker, start)
                heard = [open_envelope(item.envelope) for item in page]
            except (PeerError, Dropped) as error:
                self._node.events.emit("ledger.mirror_failed", owner=validator, reason=str(error))
                self.miss(validator, worker, start)  # retried after the others
                await trio.sleep(RETRY_SECONDS)
                continue
            for envelope in heard:
                verdict = envelope.message
                if (
                    envelope.body.run == self._run.id
                    and isinstance(verdict, Verdict)
                    and verdict.outcome == "accepted"
                    and self._run.permits(envelope.sender, verdict) is None
                ):
                    await hear(envelope)
            if page and page[-1].index >= start:
                self.miss(validator, worker, page[-1].index + 1)
