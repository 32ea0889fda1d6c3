from __future__ import annotations

from simnet.adversaries.base import Kind, deliver_nothing
from simnet.adversaries.copier import Copier
from swarm.node.run_node import RunNode


class Claimant(Copier):
    """Announces another worker's files as its own and delivers none. *Caught*: refused by check
    `file`; the other worker's file is not affected."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        deliver_nothing(peer)


KIND = Kind(Claimant, "inference", caught_by="file")
