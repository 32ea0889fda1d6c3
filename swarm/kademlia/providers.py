"""Provider records: one per (key, peer) for each peer that announces a blob; expiring, bounded."""

import random
from collections import Counter
from dataclasses import dataclass

from swarm.kademlia.routing_table import key_id
from swarm.kademlia.wire import Neighbour
from swarm.wire.identity import PeerId

PROVIDER_KEYS_MAX = 4096
"""Keys with providers stored for others; one per checkpoint is needed."""

PROVIDERS_PER_KEY_MAX = 256
"""Providers remembered for one key; an answer carries 20 of them, drawn at random."""

PROVIDER_KEYS_PER_PEER_MAX = 64
"""Keys for which one peer may be remembered as a provider."""

PROVIDER_SECONDS = 1800.0
"""Lifetime of a provider record: three republish intervals, so that a missed one does no harm."""

PROVIDER_KEY_BYTES_MAX = 80
"""Longest provider key: the limit of Go nodes."""


def provider_key(digest: bytes) -> bytes:
    """The multihash of a BLAKE3-256 digest: the key that a CID of the blob has in any kad-dht."""
    if len(digest) != 32:
        raise ValueError(f"a BLAKE3-256 digest has 32 bytes, not {len(digest)}")
    return b"\x1e\x20" + digest


@dataclass
class _Entry:
    neighbour: Neighbour
    expires_at: float


class ProviderStore:
    """Providers by key. `now` is a time on the world's clock."""

    def __init__(self, own_id: int) -> None:
        self._own_id = own_id
        self._entries: dict[bytes, dict[PeerId, _Entry]] = {}
        self._keys_of_peer: Counter[PeerId] = Counter()

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._entries.values())

    def add(self, key: bytes, provider: Neighbour, now: float) -> bool:
        """Store or renew a provider record; False if a limit refuses it."""
        if not 0 < len(key) <= PROVIDER_KEY_BYTES_MAX:
            return False
        entries = self._entries.get(key, {})
        if provider.peer not in entries:
            if self._keys_of_peer[provider.peer] >= PROVIDER_KEYS_PER_PEER_MAX:
                return False
            if key not in self._entries and not self._make_room(key):
                return False
            if len(entries) >= PROVIDERS_PER_KEY_MAX:
                self._drop(key, next(iter(entries)))
            entries = self._entries.setdefault(key, entries)
            self._keys_of_peer[provider.peer] += 1
        else:
            del entries[provider.peer]  # entries stay in the order of renewal, oldest first
        entries[provider.peer] = _Entry(provider, now + PROVIDER_SECONDS)
        return True

    def get(self, key: bytes, now: float) -> list[Neighbour]:
        """The providers of a key that have not expired, least recently renewed first."""
        entries = self._entries.get(key, {})
        return [entry.neighbour for entry in entries.values() if entry.expires_at > now]

    def sample(self, key: bytes, count: int, now: float, source: random.Random) -> list[Neighbour]:
        """At most `count` providers of a key, drawn at random so that load spreads."""
        providers = self.get(key, now)
        return providers if len(providers) <= count else source.sample(providers, count)

    def expire(self, now: float) -> None:
        for key, entries in list(self._entries.items()):
            for peer in [peer for peer, entry in entries.items() if entry.expires_at <= now]:
                self._drop(key, peer)

    def _make_room(self, key: bytes) -> bool:
        if len(self._entries) < PROVIDER_KEYS_MAX:
            return True
        farthest = max(self._entries, key=self._distance)
        if self._distance(farthest) < self._distance(key):
            return False
        for peer in list(self._entries[farthest]):
            self._drop(farthest, peer)
        return True

    def _distance(self, key: bytes) -> int:
        return key_id(key) ^ self._own_id

    def _drop(self, key: bytes, peer: PeerId) -> None:
        entries = self._entries[key]
        del entries[peer]
        self._keys_of_peer[peer] -= 1
        if not self._keys_of_peer[peer]:
            del self._keys_of_peer[peer]
        if not entries:
            del self._entries[key]
