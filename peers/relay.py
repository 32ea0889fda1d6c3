"""The relay role: fetch and check every checkpoint, and forward each piece at once."""

from typing import ClassVar

from swarm.gossip.topics import RUN
from swarm.node.run_node import RunNode
from swarm.settings import RelaySettings, RoleSettings


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
