"""What the tasks of the replica role share."""

from __future__ import annotations

from dataclasses import dataclass

from peers.outer.artifacts import Artifacts
from peers.outer.chain import Chain
from peers.outer.presence import Presence
from swarm.node.run_node import RunNode
from swarm.world.observable import Observable


@dataclass(frozen=True, eq=False)
class OuterLoop:
    """The outer loop as this trainer knows it."""

    peer: RunNode
    chain: Chain
    presence: Presence
    artifacts: Artifacts
    changed: Observable[None]
    """Touched at every news of a trainer, record, contribution and new outer state."""
