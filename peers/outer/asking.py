"""The outer protocol: a trainer asks another for round records.

On `/swarm/outer/2.0.0`, a request is one frame `[digest, count]`, and the answer one
frame with an array of envelopes: the record of that digest and its ancestors, newest first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from peers.outer.chain import Chain
from swarm.errors import DECODE_ERRORS, PeerError
from swarm.node.run_node import RunNode
from swarm.transport import Stream, StreamError
from swarm.wire.envelope import ENVELOPE_BYTES_MAX, Dropped, Envelope, open_envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Digest
from swarm.wire.outer import RoundRecord

PROTOCOL = "/swarm/outer/2.0.0"

RECORDS_MAX = 16
"""Records in one answer, which has about 10 KB for each at 64 trainers."""

ASK_SECONDS = 10.0


class _Request(msgspec.Struct, array_like=True, frozen=True):
    digest: Digest
    count: Annotated[int, Meta(ge=1, le=RECORDS_MAX)]


_Answer = Annotated[
    list[Annotated[bytes, Meta(max_length=ENVELOPE_BYTES_MAX)]], Meta(max_length=RECORDS_MAX)
]


def serve(peer: RunNode, chain: Chain, trusts: Callable[[str], bool]) -> None:
    """Answer the trainers of the run from a chain."""

    async def answer(stream: Stream) -> None:
        try:
            with trio.fail_after(ASK_SECONDS):
                raw = await stream.receive()
                if raw is None or not trusts(stream.peer):
                    return
                request = msgspec.msgpack.decode(raw, type=_Request)
                found: list[bytes] = []
                link = chain.get(request.digest)
                while link is not None and len(found) < request.count:
                    found.append(link.envelope.raw)
                    link = chain.get(link.record.parent)
                await stream.send(msgspec.msgpack.encode(found))
                await stream.end()
        except (StreamError, trio.TooSlowError, *DECODE_ERRORS) as error:
            peer.node.events.emit("outer.not_answered", remote=stream.peer, reason=str(error))
        finally:
            await stream.reset()

    peer.node.transport.serve(PROTOCOL, answer, frame_bytes_max=RECORDS_MAX * ENVELOPE_BYTES_MAX)


async def ask(peer: RunNode, other: PeerId, digest: bytes) -> list[Envelope]:
    """Return a record and its ancestors, newest first, as another trainer knows them.

    Each is signed by its sender and is the parent of the one before. Raises `PeerError`.
    """
    try:
        with trio.fail_after(ASK_SECONDS):
            await peer.node.reach(other)
            stream = await peer.node.transport.open_stream(other, PROTOCOL)
            try:
                await stream.send(msgspec.msgpack.encode(_Request(digest, RECORDS_MAX)))
                raw = await stream.receive()
            finally:
                await stream.reset()
        found = [open_envelope(each) for each in msgspec.msgpack.decode(raw or b"", type=_Answer)]
    except trio.TooSlowError as error:
        raise PeerError(f"{other} did not answer within {ASK_SECONDS:g} s") from error
    except (*DECODE_ERRORS, Dropped) as error:
        raise PeerError(f"{other} answered with invalid records: {error}") from error
    for envelope in found:
        message = envelope.message
        if not isinstance(message, RoundRecord) or envelope.body.run != peer.run.id:
            raise PeerError(f"{other} answered with a {envelope.body.kind}, not a record")
        if envelope.digest != digest:
            raise PeerError(f"{other} answered with another record than was asked for")
        digest = message.parent
    return found
