"""The relay role: fetch and check every checkpoint, and forward each piece at once."""

from __future__ import annotations

from typing import ClassVar

import pydantic

from swarm.gossip.topics import RUN
from swarm.node.run_node import RunNode
from swarm.settings import RoleSettings


class RelaySettings(RoleSettings):
    """Limits on the connections that a relay carries for peers behind NAT."""

    circuit_megabytes: int = pydantic.Field(default=1024, ge=1)
    """Megabytes of one carried connection, both ways together; then it ends."""
    circuit_seconds: int = pydantic.Field(default=3600, ge=10)
    """Seconds after which a carried connection ends; its peers may open another."""
    circuits_per_peer: int = pydantic.Field(default=32, ge=1)
    """Carried connections of one peer at once."""
    reservations: int = pydantic.Field(default=128, ge=1)
    """Peers behind NAT that the relay serves at once."""
    carry_mbps: float | None = pydantic.Field(default=None, gt=0)
    """Limit on all carried connections together in megabits per second; no limit if unset."""


class RelayRole:
    """Serves pieces of the newest checkpoints, and relays connections of peers behind NAT."""

    topics: ClassVar[tuple[str, ...]] = (RUN,)
    Settings: ClassVar[type[RoleSettings]] = RelaySettings

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer

    async def run(self) -> None:
        """Follow the run's checkpoints until it is over or the peer is cancelled."""
        self._peer.status.doing = "relaying"
        await self._peer.policies.follow()
