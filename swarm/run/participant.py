"""A peer inside a run, as the two sides of admission need it."""

from collections.abc import Callable
from dataclasses import dataclass

from swarm.events import Events
from swarm.gossip.gossip import Gossip
from swarm.run.admission import Sealer
from swarm.run.run import Run
from swarm.wire.identity import PeerId
from swarm.wire.messages import Heartbeat
from swarm.wire.messenger import Messenger
from swarm.world import World


@dataclass(frozen=True)
class Participant:
    """Who a peer is in a run, what it signs and sends with, and what it says of itself."""

    peer_id: PeerId
    run: Run
    world: World
    events: Events
    gossip: Gossip
    messenger: Messenger
    seal: Sealer
    describe: Callable[[], Heartbeat]
