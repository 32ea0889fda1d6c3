from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from peers.inference.role import InferenceRole
from simnet.adversaries.base import Kind
from swarm.errors import PeerError
from swarm.node.run_node import RunNode
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Submission

TIMES = 30


class Reannouncer(InferenceRole):
    """Announces every submission thirty times, each time signed anew. *Harmless*: a waiting
    submission's acknowledgement is signed and gossiped once."""

    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        messenger = peer.messenger
        request: Callable[..., Awaitable[Any]] = messenger.request

        async def request_often(to: PeerId, envelope: Envelope, *more: Any, **how: Any) -> Any:
            reply = await request(to, envelope, *more, **how)
            for _ in range(TIMES if isinstance(envelope.message, Submission) else 0):
                try:
                    again = await peer.seal(envelope.message, STATE_LIFETIME_SECONDS)
                    await request(to, again, *more, **how)
                except PeerError:
                    break
            return reply

        cast(Any, messenger).request = request_often


KIND = Kind(Reannouncer, "inference")
