from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.node.run_node import RunNode
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Submission


class SubmissionFlooder(InferenceRole):
    """Also delivers every submission under numbers that no order asked for. *Caught*: refused by
    check `number`; its quota of unjudged files bounds the cost."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        messenger = peer.messenger
        request: Callable[..., Awaitable[Any]] = messenger.request

        async def request_often(to: PeerId, envelope: Envelope, *more: Any, **how: Any) -> Any:
            if isinstance(envelope.message, Submission):
                for number in range(1000, 1003):
                    again = msgspec.structs.replace(envelope.message, number=number)
                    await request(to, await peer.seal(again, STATE_LIFETIME_SECONDS), *more, **how)
            return await request(to, envelope, *more, **how)

        cast(Any, messenger).request = request_often


KIND = Kind(SubmissionFlooder, "inference", caught_by="number")
