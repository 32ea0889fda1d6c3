"""The peers of a run that this one knows, connects to, and names to others."""

from __future__ import annotations

import trio

from swarm.envelope import Dropped, Envelope
from swarm.errors import PeerError
from swarm.gossip.gossip import Gossip
from swarm.gossip.slots import NEIGHBOURS_WANTED
from swarm.identity import PeerId
from swarm.messages import PeerRecord
from swarm.node.node import Node
from swarm.run.run import Run
from swarm.transport import Reachability

NEIGHBOUR_SEARCH_SECONDS = 3.0
"""Interval between attempts to find more gossip neighbours."""

NEIGHBOUR_CHECK_SECONDS = 10.0
"""Interval between checks of a peer that has enough gossip neighbours."""

RELAY_AFTER_SECONDS = 30.0
"""Time after which a peer that no other has reached directly asks relays to forward connections."""

RELAYS_USED = 2


class Neighbours:
    """Selects and connects to other peers of a run."""

    def __init__(self, node: Node, run: Run) -> None:
        self._node = node
        self._run = run

    def deals_with(self, peer: str, record: PeerRecord) -> bool:
        """Whether this peer connects to another, asks it for pieces and names it to others."""
        return self._run.evicted(peer) is None and self._run.serves(peer, record.roles)

    def others(self) -> dict[PeerId, PeerRecord]:
        """Return the records of the known peers that this one deals with."""
        known = {PeerId(each.sender): each.expect(PeerRecord) for each in self._node.records()}
        known.pop(self._node.peer_id, None)
        return {peer: record for peer, record in known.items() if self.deals_with(peer, record)}

    def records(self) -> list[Envelope]:
        """Return the peer records to give to neighbours."""
        return [
            envelope
            for envelope in self._node.records()
            if self._run.serves(envelope.sender, envelope.expect(PeerRecord).roles)
        ]

    async def meet(self) -> PeerId | None:
        """Connect to one more random peer of the run. Called when there is uplink to spare.

        Returns None if no other peer is known or the drawn one cannot be reached.
        """
        connected = set(self._node.transport.connected())
        others = [peer for peer in self.others() if peer not in connected]
        if not others:
            return None
        peer = self._node.world.random.choice(others)
        try:
            await self._node.reach(peer)
        except PeerError:
            return None  # the next call draws another
        return peer

    async def keep_enough(self, gossip: Gossip, trusted_wanted: int) -> None:
        """Keep `NEIGHBOURS_WANTED` gossip neighbours, at least `trusted_wanted` of them trusted.

        Only neighbours that take part in the run count. The trusted ones are wanted however many
        other peers connect. Runs until cancelled.
        """
        while True:
            members = gossip.members()
            near = sum(self._run.trusts(peer) for peer in members)
            wanted = max(0, NEIGHBOURS_WANTED - len(members))
            lacking = max(wanted, trusted_wanted - near)
            if lacking > 0:
                connected = self._node.transport.connected()
                known = [peer for peer in self.others() if peer not in connected]
                trusted = [
                    PeerId(peer)
                    for peer in self._run.manifest.trusted_ids()
                    if peer not in connected and peer != self._node.peer_id
                ]
                others = self._node.world.random.sample(known, min(wanted, len(known)))
                for peer in list(dict.fromkeys(trusted[:lacking] + others)):
                    try:
                        await self._node.reach(peer)
                    except (PeerError, Dropped) as error:
                        self._node.events.emit(
                            "gossip.neighbour_unreachable", remote=peer, reason=str(error)
                        )
            await trio.sleep(NEIGHBOUR_SEARCH_SECONDS if wanted > 0 else NEIGHBOUR_CHECK_SECONDS)

    async def be_reachable(self) -> None:
        """Ask relays to forward connections to this peer if it is behind NAT.

        Hole punching later makes the connections direct.
        """
        await trio.sleep(RELAY_AFTER_SECONDS)
        transport = self._node.transport
        if transport.reachability() is Reachability.PUBLIC or "relay" in self._node.settings.role:
            return
        if not self._run.serves(self._node.peer_id, self._node.settings.role):
            return  # no peer connects to a client
        used = 0
        for envelope in self._node.records():
            record = envelope.expect(PeerRecord)
            if "relay" not in record.roles or used >= RELAYS_USED or not record.addresses:
                continue
            try:
                await transport.use_relay(record.addresses[0])
                used += 1
                self._node.events.emit("transport.relay_used", relay=envelope.sender)
            except PeerError as error:
                self._node.events.emit(
                    "transport.relay_refused", relay=envelope.sender, reason=str(error)
                )
