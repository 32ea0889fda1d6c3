"""What the replica role's tasks share: the outer loop, the others' statuses and records."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Annotated, NamedTuple

import msgspec
import trio
from msgspec import Meta

from peers.outer.artifacts import Artifacts
from peers.outer.chain import Chain
from swarm.errors import DECODE_ERRORS, PeerError
from swarm.node.run_node import RunNode
from swarm.transport import Stream, StreamError
from swarm.wire.envelope import (
    CLOCK_SKEW_SECONDS_MAX,
    ENVELOPE_BYTES_MAX,
    Dropped,
    Envelope,
    open_envelope,
)
from swarm.wire.identity import PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Digest
from swarm.wire.outer import Measured, OuterStatus, RoundRecord, Stage
from swarm.world.observable import Observable


@dataclass(frozen=True, eq=False)
class OuterLoop:
    """The outer loop as this trainer knows it."""

    peer: RunNode
    chain: Chain
    presence: "Presence"
    artifacts: Artifacts
    changed: Observable[None]
    """Touched at every news of a trainer, record, contribution and new outer state."""


STATUS_SECONDS = 10.0
"""Interval of a trainer's status while nothing changes."""

PRESENT_SECONDS = 3 * STATUS_SECONDS
"""A trainer is present for this long after its status."""

STATUS_GAP_SECONDS = 1.0
"""Least time between two statuses that differ in the shards that a trainer holds; in proportion to
the number of trainers, if more than eight, while it still fetches."""

STATUS_LIFETIME_SECONDS = 60.0


@dataclass(frozen=True)
class Heard:
    """A trainer's newest status."""

    envelope: Envelope
    until: float
    """When the trainer counts as gone, in the world's seconds."""

    @property
    def status(self) -> OuterStatus:
        return self.envelope.expect(OuterStatus)


class _Known(NamedTuple):
    """What follows from the statuses heard so far, until the next one is heard."""

    manifest: RunManifest
    others: dict[str, OuterStatus]
    present: list[str]
    until: float
    """When the next of the present trainers counts as gone."""


class Presence:
    """The newest status of every other trainer."""

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._heard: dict[str, Heard] = {}
        self._cached: _Known | None = None
        self.own: tuple[bytes | None, list[Measured]] = (None, [])
        """What this trainer measured of strangers' contributions from a record's outer state."""

    def hear(self, envelope: Envelope) -> bool:
        """Take over a status, which may have been repeated long after it was signed.

        Returns whether it has news, and is not only a sign of life."""
        world = self._peer.node.world
        age = world.wall_time() - envelope.body.issued_ms / 1000
        late = max(0.0, age - CLOCK_SKEW_SECONDS_MAX)
        until = world.now() + PRESENT_SECONDS - late
        if envelope.expect(OuterStatus).leaving:
            until = world.now()
        before = self._heard.get(envelope.sender)
        self._heard[envelope.sender] = heard = Heard(envelope, until)
        self._cached = None
        return before is None or before.until <= world.now() or before.status != heard.status

    def _known(self) -> _Known:
        """Worked out once per status heard, since every step of a round asks for it many times."""
        manifest, now = self._peer.run.manifest, self._peer.node.world.now()
        known = self._cached
        if known is None or known.manifest is not manifest or now >= known.until:
            trusted, me = {*manifest.trainer_ids()}, self._peer.peer_id
            some = {
                trainer: heard
                for trainer, heard in sorted(self._heard.items())
                if trainer in trusted and trainer != me
            }
            here = {trainer: heard.until for trainer, heard in some.items() if now < heard.until}
            others = {trainer: heard.status for trainer, heard in some.items()}
            present = sorted([*here, *({me} & trusted)])
            known = _Known(manifest, others, present, min(here.values(), default=inf))
            self._cached = known
        return known

    def others(self) -> dict[str, OuterStatus]:
        """The newest status of each other trainer that the run still trusts, by peer id."""
        return self._known().others

    def present(self) -> list[str]:
        """Trainers that are present, this one included if it is one, sorted."""
        return self._known().present

    def at(self, stage: Stage) -> dict[str, bytes]:
        """The records whose outer states the other trainers hold that are present at a stage."""
        found, present = self.others().items(), self.present()
        return {who: told.record for who, told in found if told.stage == stage and who in present}

    def gone_in(self) -> float:
        """Seconds until the next of the present trainers counts as gone."""
        return self._known().until - self._peer.node.world.now()


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


def serve_records(peer: RunNode, chain: Chain, trusts: Callable[[str], bool]) -> None:
    """Answer the trainers of the run from a chain.

    On `/swarm/outer/2.0.0`, a request is one frame `[digest, count]`, and the answer one frame with
    an array of envelopes: the record of that digest and its ancestors, newest first."""

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

    Each is signed by its sender and is the parent of the one before. Raises `PeerError`."""
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
