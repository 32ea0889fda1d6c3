from __future__ import annotations

from simnet.adversaries.base import Adversary, Kind, answer_dht
from swarm.node.run_node import RunNode


class Silent(Adversary):
    """Keeps connections and streams open and never answers the DHT. *Harmless*: each request has
    a deadline, and a peer that misses it twice is dropped from the contacts."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        answer_dht(peer.node.transport, lambda _: None)


KIND = Kind(Silent)
