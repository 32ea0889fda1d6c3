"""The peers of a run that this one knows, connects to, and names to others."""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence

import trio

from swarm.errors import PeerError
from swarm.gossip.gossip import Gossip
from swarm.gossip.slots import NEIGHBOURS_WANTED
from swarm.node.node import Node
from swarm.rollouts.seeds import rendezvous
from swarm.run.run import Run
from swarm.transport import Reachability
from swarm.wire.envelope import Dropped, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import PeerRecord

NEIGHBOUR_SEARCH_SECONDS = 3.0
"""Interval between attempts to find more gossip neighbours."""

NEIGHBOUR_CHECK_SECONDS = 10.0
"""Interval between checks of a peer that has enough gossip neighbours."""

RELAY_AFTER_SECONDS = 30.0
"""Time after which a peer asks relays to forward connections though it does not know yet whether
others can reach it directly."""

RELAYS_USED = 2

RELAY_ADDRESSES_USED = 4
"""Addresses announced per relay: a peer that has only IPv4 or only IPv6 needs another one."""

BRIDGES_USED = 1
"""Relays used by a peer that most others can connect to."""

PEERS_PER_RELAY_MAX = 64
"""Known peers for each known relay, up to which such a peer asks one: half of a relay's slots."""

CIRCUIT = "/p2p-circuit"

WEB_PORTS = ("80", "443")
"""The only ones that strict firewalls leave open."""


def bridges(
    own: Iterable[str], relays: Mapping[PeerId, Sequence[str]], peers: int
) -> dict[PeerId, Sequence[str]]:
    """The relays through which a peer can be reached in ways that its own addresses do not offer;
    none in a network of too many peers. `own`, `relays`: multiaddrs."""
    if peers > PEERS_PER_RELAY_MAX * len(relays):
        return {}
    offered = _ways(own)
    return {relay: at for relay, at in relays.items() if _ways(at) - offered}


def _ways(addresses: Iterable[str]) -> set[str]:
    """What addresses offer of what some peers need: IPv6, or one of the web's ports."""
    found = set()
    for address in addresses:
        _, kind, host, _, port, *_ = [*address.split("/"), *[""] * 5]
        if CIRCUIT not in address and not host.startswith("127."):
            found |= {"IPv6"} if kind == "ip6" and _is_global(host) else set()
            found |= {"web"} if port in WEB_PORTS else set()
    return found


def _is_global(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


class Neighbours:
    """Selects and connects to other peers of a run."""

    def __init__(self, node: Node, run: Run) -> None:
        self._node = node
        self._run = run

    def deals_with(self, peer: str, record: PeerRecord) -> bool:
        """Whether this peer connects to another, asks it for pieces and names it to others."""
        return self._run.evicted(peer) is None and self._run.serves(peer, record.roles)

    def record(self, peer: PeerId) -> PeerRecord | None:
        """Another peer's record, if it is known and this peer deals with it."""
        record = self._node.record(peer) if peer != self._node.peer_id else None
        return record if record is not None and self.deals_with(peer, record) else None

    def others(self) -> dict[PeerId, PeerRecord]:
        """Return the records of the known peers that this one deals with."""
        peers = (PeerId(each.sender) for each in self._node.records())
        return {peer: record for peer in peers if (record := self.record(peer)) is not None}

    def some_records(self, most: int) -> list[Envelope]:
        """Draw peer records to give to a new neighbour."""
        known = self._node.records()
        drawn: dict[int, None] = {}
        chosen: list[Envelope] = []
        while len(chosen) < most and len(drawn) < len(known):
            index = self._node.world.random.randrange(len(known))
            envelope = known[index]
            if index not in drawn and self._run.serves(
                envelope.sender, envelope.expect(PeerRecord).roles
            ):
                chosen.append(envelope)
            drawn[index] = None
        return chosen

    async def meet(self) -> PeerId | None:
        """Connect to one more random peer of the run. Called when there is uplink to spare.

        Returns None if no other peer is known or the drawn one cannot be reached."""
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

        Only neighbours in the run count. In a large run trusted peers have slots for few: those
        that refuse are left alone for a while. Runs until cancelled."""
        while True:
            members = gossip.members()
            near = sum(self._run.trusts(peer) for peer in members)
            wanted = max(0, NEIGHBOURS_WANTED - len(members))
            lacking = max(wanted, trusted_wanted - near)
            if lacking > 0:
                connected = set(self._node.transport.connected())
                known: list[PeerId] = []
                if wanted:
                    known = [peer for peer in self.others() if peer not in connected]
                # The first in rank has this peer's heartbeats, so it is connected already.
                own = self._node.peer_id.encode()
                trusted = [
                    PeerId(peer)
                    for peer in rendezvous(self._run.manifest.trusted_ids(), own)
                    if peer != self._node.peer_id
                    and peer not in members
                    and not gossip.is_refused_by(PeerId(peer))
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
        """Ask relays to forward connections to this peer while some peers cannot connect to it.

        A peer that others reach over IPv4 asks one relay, for those that have only IPv6, or only
        the web's ports; but not in a large network, where the slots are others'. Hole punching
        later makes the connections direct. Runs until cancelled."""
        if "relay" in self._node.settings.role:
            return
        transport = self._node.transport
        surely_after = trio.current_time() + RELAY_AFTER_SECONDS
        used: set[PeerId] = set()
        refused: set[PeerId] = set()
        while len(used) < RELAYS_USED:
            unknown = transport.reachability() is Reachability.UNKNOWN
            # No peer connects to a client.
            if self._run.serves(self._node.peer_id, self._node.settings.role):
                relays = self._relays()
                if transport.wants_relay() or (unknown and trio.current_time() >= surely_after):
                    await self._ask_relays(relays, RELAYS_USED, used, refused)
                elif not unknown:
                    found = bridges(transport.addresses(), relays, len(self.others()))
                    await self._ask_relays(found, BRIDGES_USED, used, refused)
            await trio.sleep(NEIGHBOUR_CHECK_SECONDS if not unknown else NEIGHBOUR_SEARCH_SECONDS)

    def _relays(self) -> dict[PeerId, list[str]]:
        found: dict[PeerId, list[str]] = {}
        for envelope in self._node.records():
            record = envelope.expect(PeerRecord)
            addresses = [each for each in record.addresses if CIRCUIT not in each]
            addresses.sort(key=lambda each: each.startswith(("/ip4/127.", "/ip6/::1/")))
            if "relay" in record.roles and addresses:
                found[PeerId(envelope.sender)] = addresses
        return found

    async def _ask_relays(
        self,
        relays: Mapping[PeerId, Sequence[str]],
        most: int,
        used: set[PeerId],
        refused: set[PeerId],
    ) -> None:
        """Ask relays, until `most` are used. A repeated refusal is not reported."""
        for relay, addresses in relays.items():
            if len(used) >= most:
                return
            if relay in used:
                continue
            try:
                await self._node.transport.use_relay(relay, addresses[:RELAY_ADDRESSES_USED])
                used.add(relay)
                self._node.events.emit("transport.relay_used", relay=relay)
            except PeerError as error:
                if relay not in refused:
                    refused.add(relay)
                    self._node.events.emit(
                        "transport.relay_refused", relay=relay, reason=str(error)
                    )
