"""The protocol between a standby and its trainer.

On `/swarm/standby/1.0.0`, framing SWARM, a request is one frame `[lineage, step]`, the state that
the standby has (-1, -1: none). The answer is one frame, an `Offer`, once the trainer has a bundle
of a newer state, or just the end after `ANSWER_SECONDS`. A standby asks again at once. So a trainer
makes bundles no faster than its standbys take them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from peers.trainer.standby.bundle import CONTENTS_BYTES_MAX
from swarm.errors import DECODE_ERRORS, PeerError
from swarm.node.run_node import RunNode
from swarm.transport import StreamError
from swarm.wire.identity import PeerId
from swarm.wire.messages import CheckpointReference, Count

PROTOCOL = "/swarm/standby/1.0.0"

ANSWER_SECONDS = 60.0
REACH_SECONDS = 15.0
FRAME_BYTES_MAX = CONTENTS_BYTES_MAX + 4096


class Asked(msgspec.Struct, array_like=True, frozen=True):
    """The state that a standby has."""

    lineage: Annotated[int, Meta(ge=-1, le=2**53)]
    step: Annotated[int, Meta(ge=-1, le=2**53)]


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """A bundle, fetched as a checkpoint is: its pieces are named by their hashes."""

    reference: CheckpointReference
    total_bytes: Count
    sealed: Annotated[bytes, Meta(max_length=CONTENTS_BYTES_MAX)]
    """Its contents (`bundle.Contents`), sealed to this standby's key."""


async def ask(peer: RunNode, trainer: PeerId, asked: Asked) -> Offer | None:
    """Wait for a bundle that is newer than `asked`; None: there is none yet. Raises `PeerError`."""
    try:
        with trio.fail_after(REACH_SECONDS):
            await peer.node.reach(trainer)
            stream = await peer.node.transport.open_stream(trainer, PROTOCOL)
        try:
            with trio.fail_after(ANSWER_SECONDS + REACH_SECONDS):
                await stream.send(msgspec.msgpack.encode(asked))
                await stream.end()
                raw = await stream.receive()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.reset()
        return None if raw is None else msgspec.msgpack.decode(raw, type=Offer)
    except trio.TooSlowError as error:
        raise PeerError(f"{trainer} did not answer in time") from error
    except StreamError as error:
        raise PeerError(f"{trainer} broke off ({error})") from error
    except DECODE_ERRORS as error:
        raise PeerError(f"{trainer} offered a malformed bundle: {error}") from error
