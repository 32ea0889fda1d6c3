from __future__ import annotations

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind, deliver_nothing
from swarm.node.run_node import RunNode


class Withholder(InferenceRole):
    """Announces submissions and never delivers their files. *Caught* by check `file`: answered
    nothing, and none of its numbers counts."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        deliver_nothing(peer)


KIND = Kind(Withholder, "inference", caught_by="file")
