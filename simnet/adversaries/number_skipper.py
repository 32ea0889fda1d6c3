from __future__ import annotations

from typing import Any, cast

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.node.run_node import RunNode
from swarm.transport import BlobReference, Source


class NumberSkipper(InferenceRole):
    """Keeps back the files that it does not like, every other one, and hands in the next numbers.
    *Caught* by check `file`: a number without its file settles nothing, and no later one counts."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        transport = peer.node.transport
        push = transport.push

        async def push_liked(target: Source, reference: BlobReference, path: str) -> None:
            if reference.digest[0] % 2:
                await push(target, reference, path)

        cast(Any, transport).push = push_liked


KIND = Kind(NumberSkipper, "inference", caught_by="file")
