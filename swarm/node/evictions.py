"""Effects of evictions: evicted peers are disconnected, and this peer leaves if it is evicted."""

import math

import trio

from swarm.gossip.gossip import Gossip
from swarm.node.node import Node
from swarm.run.admission import NotAdmitted
from swarm.run.run import Run
from swarm.wire.envelope import BAN_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Eviction, Reinstatement
from swarm.world.observable import Observable

EVICTION_NOTICE_SECONDS = 2.0
"""Delay between an eviction and the disconnection, so that the peer can receive the reason."""

EVICTIONS_KEPT = 4096
"""Evictions that a peer remembers that is not trusted: far more than come within a lease, after
which no admission of an evicted peer is left. Trusted peers, who admit, remember all."""


class Evictions:
    """Carries out the evictions of a run."""

    def __init__(self, node: Node, run: Run, gossip: Gossip) -> None:
        self._node = node
        self._run = run
        self._own: Observable[Eviction | None] = Observable(None)
        self._heard, self._evicted = trio.open_memory_channel[tuple[PeerId, float]](
            math.inf  # only trusted peers sign evictions
        )
        """Evicted peers, and when this one heard of the eviction."""
        gossip.listen(Eviction, self._hear)
        gossip.listen(Reinstatement, run.expel)

    def _hear(self, envelope: Envelope) -> None:
        self._run.expel(envelope)
        if not self._run.trusts(self._node.peer_id):
            self._run.forget_evictions(EVICTIONS_KEPT)
        eviction = envelope.expect(Eviction)
        evicted = PeerId(eviction.peer)
        self._node.events.emit("membership.peer_evicted", remote=evicted, reason=eviction.reason)
        if evicted == self._node.peer_id:
            self._own.set(eviction)
        else:
            self._heard.send_nowait((evicted, self._node.world.now()))

    async def cut_off(self) -> None:
        """Ban evicted peers `EVICTION_NOTICE_SECONDS` after their evictions, until cancelled."""
        async for peer, heard in self._evicted:
            await trio.sleep_until(heard + EVICTION_NOTICE_SECONDS)
            if self._run.evicted(peer) is not None:
                self._node.transport.ban(peer, BAN_SECONDS)

    async def leave(self) -> None:
        """Wait until this peer is evicted; raises `NotAdmitted` then."""
        eviction = await self._own.wait_until(lambda eviction: eviction is not None)
        assert eviction is not None
        raise NotAdmitted(f"evicted: {eviction.reason}")
