from __future__ import annotations

from typing import Any, cast

from peers.relay import RelayRole
from simnet.adversaries.base import Kind
from simnet.flows import Link
from swarm.node.run_node import RunNode

BYTES_PER_SECOND = 0.2
"""Less than one byte within the receiver's patience for a silent sender."""


class SlowLoris(RelayRole):
    """Fetches and offers every checkpoint, accepts every request, and sends a byte now and then.
    *Harmless*: late pieces are requested from other peers as well, and a transfer below the minimum
    rate is cancelled."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        cast(Any, peer.node.transport).uplink = Link(BYTES_PER_SECOND)


KIND = Kind(SlowLoris)
