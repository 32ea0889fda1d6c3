"""The observer role: follow all announcements of a run and change nothing."""

from typing import ClassVar

from swarm.gossip.topics import RUN, WORK
from swarm.node.run_node import RunNode
from swarm.wire.messages import Acknowledgement, Eviction, Verdict


class ObserverRole:
    """Watches a run and emits events, for example for a dashboard."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        for message_type in (Acknowledgement, Verdict, Eviction):
            peer.gossip.listen(
                message_type,
                lambda envelope: peer.node.events.emit(
                    f"observer.{envelope.body.kind}", sender=envelope.sender
                ),
            )

    async def run(self) -> None:
        """Watch until the run is over or the peer is cancelled."""
        self._peer.status.doing = "observing"
        await self._peer.run_over()
