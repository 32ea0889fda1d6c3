"""The clients of a piece server: their connections, and the rate of their small requests."""

from __future__ import annotations

from collections import Counter

import trio

from swarm.identity import PeerId
from swarm.rates import TokenBuckets

CONNECTIONS_PER_PEER_MAX = 32
"""Connections on which one peer has proved its identity: an honest peer needs about four."""

SMALL_REQUESTS_PER_SECOND = 100.0
"""Requests that move no blob (proofs, refusals, heads), per address and per peer; more must wait.
A peer that waits for a piece asks at most 20 times a second on a connection."""

SMALL_REQUESTS_BURST = 400.0
"""Small requests at once: a hundred peers behind one address that connect after a checkpoint."""

CLIENTS_KNOWN_MAX = 4096
"""Addresses and peers whose small requests are remembered; the least recent is forgotten."""


class Clients:
    """Counts connections per peer, and limits small requests per address and per peer."""

    def __init__(self) -> None:
        self._connections: Counter[PeerId] = Counter()
        self._small_requests = TokenBuckets(
            SMALL_REQUESTS_PER_SECOND, SMALL_REQUESTS_BURST, CLIENTS_KNOWN_MAX
        )

    def enter(self, peer: PeerId) -> bool:
        """Count a connection on which a peer proved its identity; False if it has too many."""
        if self._connections[peer] >= CONNECTIONS_PER_PEER_MAX:
            return False
        self._connections[peer] += 1
        return True

    def leave(self, peer: PeerId) -> None:
        self._connections[peer] -= 1
        if not self._connections[peer]:
            del self._connections[peer]

    async def wait_turn(self, name: str) -> None:
        """Wait until an address or peer may make its next small request.

        A flood of challenges, wrong proofs or unknown names slows only its sender.
        """
        now = trio.current_time()
        bucket = self._small_requests.of(name)
        seconds = bucket.debt_seconds(now)
        bucket.borrow(1, now)
        if seconds:
            await trio.sleep(seconds)
