"""The messages that are gossiped in a run, and their topics.

They travel in frames: msgpack arrays whose first element is a tag.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.wire import messages
from swarm.wire.envelope import ENVELOPE_BYTES_MAX
from swarm.wire.manifest import RunManifest
from swarm.wire.outer import OuterStatus, RoundRecord

PROTOCOL = "/swarm/gossip/2.0.0"

DIGESTS_MAX = 512

RECORDS_EXCHANGED = 16
"""Peer records handed to a new neighbour, so that it finds others."""

FRAME_BYTES_MAX = 2 * ENVELOPE_BYTES_MAX + RECORDS_EXCHANGED * 4096

_Raw = Annotated[bytes, Meta(max_length=ENVELOPE_BYTES_MAX)]
_Digests = Annotated[list[messages.Digest], Meta(max_length=DIGESTS_MAX)]


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """The first frame of each side."""

    run: messages.Name
    wall_ms: Annotated[int, Meta(ge=0, le=2**53)]
    topics: Annotated[list[Annotated[str, Meta(max_length=20)]], Meta(max_length=8)]
    records: Annotated[list[_Raw], Meta(max_length=RECORDS_EXCHANGED)]
    admission: _Raw = b""


class Shown(msgspec.Struct, array_like=True, frozen=True, tag="admission"):
    """The sender's admission, new or renewed."""

    admission: _Raw


class Push(msgspec.Struct, array_like=True, frozen=True, tag="push"):
    """One envelope."""

    envelope: _Raw


class Have(msgspec.Struct, array_like=True, frozen=True, tag="have"):
    """Digests of envelopes that the sender holds."""

    digests: _Digests


class Want(msgspec.Struct, array_like=True, frozen=True, tag="want"):
    """Digests of envelopes that the sender asks for."""

    digests: _Digests


Frame = Hello | Shown | Push | Have | Want
decode = msgspec.msgpack.Decoder(Frame).decode
encode = msgspec.msgpack.Encoder().encode


def chunks(digests: Sequence[bytes]) -> Iterable[list[bytes]]:
    """Divide digests into lists that fit one frame each."""
    for start in range(0, len(digests), DIGESTS_MAX):
        yield list(digests[start : start + DIGESTS_MAX])


RUN = "run"
WORK = "work"
TOPICS: dict[type[messages.Message], str] = {
    RunManifest: RUN,
    messages.Checkpoint: RUN,
    messages.StepOrder: RUN,
    messages.Eviction: RUN,
    messages.Reinstatement: RUN,
    messages.Acknowledgement: WORK,
    messages.Verdict: WORK,
    messages.Presence: WORK,
    messages.Evaluation: WORK,
    messages.LogHead: WORK,
    OuterStatus: WORK,
    RoundRecord: WORK,
}
"""The topic of each message type. Other types are never gossiped. Only the owner and trusted peers
may send these (`Run.permits`), so no stranger can make others forward or store anything."""

STATES_FIRST = (
    RunManifest,
    messages.Checkpoint,
    messages.StepOrder,
    messages.LogHead,
    messages.Presence,
    OuterStatus,
    messages.Evaluation,
)
"""State messages in the order in which a neighbour is offered them; evictions and events follow."""

LASTING = (messages.Eviction, messages.Reinstatement)
"""Events that newcomers must learn of, however long ago they happened."""

ROUTINE = (messages.Checkpoint, messages.StepOrder, messages.Presence, OuterStatus)
"""States that come with every step, or every few seconds. A neighbour that gets them from others as
early gets only their digests, at the next tick. Others are rare or urgent, and always pushed."""

HEARTBEATS = (messages.Presence, OuterStatus)
"""Those of them that tell who is there: a later one makes up for one that comes late."""
