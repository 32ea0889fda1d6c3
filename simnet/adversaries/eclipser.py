from __future__ import annotations

from collections.abc import Iterator

from simnet.adversaries.base import Kind
from simnet.adversaries.sybil import CROWD, Sybil
from swarm.kademlia.routing_table import key_id, node_id
from swarm.run.records import peer_key, run_key
from swarm.wire.identity import Identity

GROUND = 1024
"""Identities drawn to find the nearest to two keys: enough to be nearer than any of 50 peers."""


class Eclipser(Sybil):
    """Like `Sybil`, but in many networks, and with identities ground until they are nearer to the
    trainer's or the run's record than honest peers are."""

    def _identities(self) -> Iterator[tuple[Identity, str | None]]:
        run, secret = self._peer.run, self._peer.node.world.secret_bytes
        drawn = [Identity(secret(32)) for _ in range(GROUND)]
        for key in (run_key(run.id), peer_key(run.manifest.trainers[0].peer)):
            drawn.sort(key=lambda identity: node_id(identity.peer_id) ^ key_id(key))
            yield from ((identity, None) for identity in drawn[:CROWD])
            del drawn[:CROWD]


KIND = Kind(Eclipser)
