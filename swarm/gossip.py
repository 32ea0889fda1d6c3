"""Epidemic announcements of one run: signed envelopes only, to everyone who follows their topic.

Protocol `/swarm/gossip/1.0.0`, framing SWARM, one stream per pair of neighbours, opened by the
peer whose id sorts first. Frames are msgpack arrays whose first element is a tag:

- `hello`: run id, wall time in ms, topics followed, some peer records (so that a
  newcomer finds neighbours);
- `push`: one envelope;
- `have`: digests of envelopes the sender holds;
- `want`: digests of those the receiver of a `have` lacks; answered with `push`.

A new envelope is pushed at once to `GOSSIP_EAGER` neighbours that follow its topic and are not
known to hold it, and offered by digest to the others on the next tick. On `hello`, and once a tick
where something changed, neighbours offer each other the newest states and everything long-lived,
so a lost push heals within a tick, and what came faster than its sender may send is asked for
again (anti-entropy; Demers et al. 1987, eager/lazy as in Plumtree, Leitão et al. 2007).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from swarm import defaults
from swarm.envelope import Dropped, Envelope, Gate, open_envelope
from swarm.errors import DECODE_ERRORS
from swarm.events import Events
from swarm.identity import PeerId
from swarm.messages import (
    Acknowledgement,
    Checkpoint,
    Digest,
    Eviction,
    LogHead,
    Message,
    Name,
    PeerRecord,
    Presence,
    Reinstatement,
    RunManifest,
    StateMessage,
    StepOrder,
    Submission,
    Verdict,
)
from swarm.transport import Stream, StreamError, Transport
from swarm.world import World

PROTOCOL = "/swarm/gossip/1.0.0"

RUN = "run"
WORK = "work"
TOPICS: dict[type[Message], str] = {
    RunManifest: RUN,
    Checkpoint: RUN,
    StepOrder: RUN,
    Eviction: RUN,
    Reinstatement: RUN,
    Submission: WORK,
    Acknowledgement: WORK,
    Verdict: WORK,
    Presence: WORK,
    LogHead: WORK,
}
"""Which topic carries a message. What is not listed is never gossiped."""

_LASTING = (Eviction, Reinstatement)
"""Events that newcomers must learn of, however long ago they happened."""

_LATE_PER_TICK = int(defaults.SENDER_RATE_PER_SECOND * defaults.GOSSIP_TICK_SECONDS)

_Raw = Annotated[bytes, Meta(max_length=defaults.ENVELOPE_BYTES_MAX)]
_Digests = Annotated[list[Digest], Meta(max_length=defaults.GOSSIP_DIGESTS_MAX)]


class _Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    run: Name
    wall_ms: Annotated[int, Meta(ge=0, le=2**53)]
    topics: Annotated[list[Annotated[str, Meta(max_length=20)]], Meta(max_length=8)]
    records: Annotated[list[_Raw], Meta(max_length=defaults.GOSSIP_RECORDS_EXCHANGED)]


class _Push(msgspec.Struct, array_like=True, frozen=True, tag="push"):
    envelope: _Raw


class _Have(msgspec.Struct, array_like=True, frozen=True, tag="have"):
    digests: _Digests


class _Want(msgspec.Struct, array_like=True, frozen=True, tag="want"):
    digests: _Digests


_decoder = msgspec.msgpack.Decoder(_Hello | _Push | _Have | _Want)
_encoder = msgspec.msgpack.Encoder()


class _Refusal:
    """That a peer would not talk."""

    def __init__(self) -> None:
        self.times = 0
        self.retry_at = 0.0
        self.full = False
        """It has neighbours enough: it would refuse over a new connection, too."""


class _Neighbour:
    """A peer with an open gossip stream, and what it is known to hold."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.peer = stream.peer
        self.topics: frozenset[str] = frozenset()
        self.knows: dict[bytes, None] = {}
        self.late: dict[bytes, None] = {}
        """What it sent faster than its sender may: asked for again, bit by bit."""
        self.invalid = 0
        self.scope = trio.CancelScope()
        self.outbox: list[bytes] = []
        self.writing = False

    def learn(self, digest: bytes) -> None:
        self.knows.pop(digest, None)
        self.knows[digest] = None
        if len(self.knows) > 2 * defaults.GOSSIP_STORE_MAX:
            del self.knows[next(iter(self.knows))]


Listener = Callable[[Envelope], None]


class Gossip:
    """One peer's part in spreading a run's announcements."""

    def __init__(
        self,
        transport: Transport,
        world: World,
        gate: Gate,
        events: Events,
        run: str,
        topics: Sequence[str],
        *,
        records: Callable[[], Sequence[Envelope]],
        learn_record: Callable[[Envelope], None],
        compare_clock: Callable[[PeerId, float], None] = lambda _peer, _seconds: None,
    ) -> None:
        """`records` gives peer records to hand to newcomers; `learn_record` takes theirs
        (signature checked); `compare_clock` hears how far ahead a neighbour's clock is."""
        self._transport = transport
        self._world = world
        self._gate = gate
        self._events = events
        self._run = run
        self._topics = frozenset(topics)
        self._records = records
        self._learn_record = learn_record
        self._compare_clock = compare_clock
        self._neighbours: dict[PeerId, _Neighbour] = {}
        self._refusals: dict[PeerId, _Refusal] = {}
        """Peers that would not talk."""
        self._open_at = 0.0
        """When to look for peers to start a conversation with."""
        self._fresh: list[Envelope] = []
        """Accepted since the last tick."""
        self._store: OrderedDict[bytes, Envelope] = OrderedDict()
        self._lasting: dict[bytes, Envelope] = {}
        self._listeners: dict[type[Message], list[Listener]] = {}
        self._nursery: trio.Nursery | None = None

    def listen(self, message_type: type[Message], listener: Listener) -> None:
        """Call `listener` once for every new envelope of this type, own ones included."""
        self._listeners.setdefault(message_type, []).append(listener)

    def neighbours(self) -> list[PeerId]:
        return sorted(self._neighbours)

    def kept(self) -> int:
        """How many announcements are held for neighbours that lack them."""
        return len(self._store)

    def publish(self, envelope: Envelope) -> None:
        """Spread an own envelope, or one that came another way. A duplicate does nothing."""
        try:
            self._gate.admit(envelope.raw, limited=False)
        except Dropped as dropped:
            if dropped.cause not in ("duplicate", "old_state"):
                raise
            # An event may have passed the gate as a request, and never have been gossiped.
            state = isinstance(envelope.message, StateMessage)
            if dropped.cause == "old_state" or state or self._holds(envelope.digest):
                return
        self._accept(envelope, came_from=None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a stream with every connected neighbour until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            connections = self._transport.connection_events()
            self._transport.serve(
                PROTOCOL,
                self._converse,
                frame_bytes_max=2 * defaults.ENVELOPE_BYTES_MAX
                + defaults.GOSSIP_RECORDS_EXCHANGED * 4096,
            )
            nursery.start_soon(self._tick, nursery)
            task_status.started()
            self._open_more(nursery)
            async for event in connections:
                if event.connected:
                    refusal = self._refusals.get(event.peer)
                    if refusal is not None and not refusal.full:
                        del self._refusals[event.peer]
                    if self._may_open(event.peer):
                        nursery.start_soon(self._open, event.peer)

    # --- neighbours --------------------------------------------------------------------------

    def _opens_at(self, peer: PeerId) -> float:
        """From when on a conversation is ours to start; inf if it is not, as things are."""
        if (
            self._transport.peer_id > peer
            or peer in self._neighbours
            or len(self._neighbours) >= defaults.GOSSIP_NEIGHBOURS_MAX
        ):
            return math.inf
        refusal = self._refusals.get(peer)
        if refusal is None:
            return 0.0
        enough = len(self._neighbours) >= defaults.GOSSIP_NEIGHBOURS_WANTED
        pause = defaults.GOSSIP_FULL_SECONDS if refusal.full and enough else 0.0
        return refusal.retry_at + pause

    def _may_open(self, peer: PeerId) -> bool:
        return self._opens_at(peer) <= self._world.now()

    def _open_more(self, nursery: trio.Nursery) -> None:
        """Start conversations with connected peers while there is room for neighbours."""
        now = self._world.now()
        self._open_at = math.inf
        for peer in self._transport.connected():
            opens_at = self._opens_at(peer)
            if opens_at <= now:
                nursery.start_soon(self._open, peer)
            else:
                self._open_at = min(self._open_at, opens_at)

    async def _open(self, peer: PeerId) -> None:
        """Start a conversation."""
        if not self._may_open(peer):
            return  # others were faster
        refusal = self._refusals.setdefault(peer, _Refusal())
        pause = min(defaults.GOSSIP_BAN_SECONDS, defaults.GOSSIP_TICK_SECONDS * 2**refusal.times)
        refusal.times = min(refusal.times + 1, 10)
        refusal.retry_at = self._world.now() + pause
        self._open_at = min(self._open_at, refusal.retry_at)
        try:
            with trio.fail_after(defaults.REQUEST_DEADLINE_SECONDS):
                stream = await self._transport.open_stream(peer, PROTOCOL)
        except (StreamError, trio.TooSlowError) as error:
            self._events.emit("gossip.not_spoken", remote=peer, reason=str(error))
            return
        refusal.full = True  # unless it greets
        await self._converse(stream)

    async def _converse(self, stream: Stream) -> None:
        peer = stream.peer
        if peer in self._neighbours or len(self._neighbours) >= defaults.GOSSIP_NEIGHBOURS_MAX:
            await stream.reset()
            return
        neighbour = self._neighbours[peer] = _Neighbour(stream)
        # Any of them: were it always the first, everybody would dial the same few peers.
        known = self._records()
        count = min(len(known), defaults.GOSSIP_RECORDS_EXCHANGED)
        records = [record.raw for record in self._world.random.sample(known, count)]
        wall_ms = int(self._world.wall_time() * 1000)
        self._post(neighbour, _Hello(self._run, wall_ms, sorted(self._topics), records))
        try:
            with neighbour.scope:
                await self._read(neighbour)
        except (StreamError, *DECODE_ERRORS) as error:
            self._events.emit("gossip.neighbour_lost", remote=peer, reason=str(error))
        finally:
            del self._neighbours[peer]
            self._open_at = 0.0  # there is room again
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.reset()

    def _post(self, neighbour: _Neighbour, frame: _Hello | _Push | _Have | _Want) -> None:
        """Queue a frame; a neighbour too slow to take it is dropped, and may come back."""
        assert self._nursery is not None
        ending = self._nursery.cancel_scope.cancel_called
        if ending or len(neighbour.outbox) >= defaults.GOSSIP_OUTBOX_MAX:
            neighbour.scope.cancel()
            return
        neighbour.outbox.append(_encoder.encode(frame))
        if not neighbour.writing:
            neighbour.writing = True
            self._nursery.start_soon(self._write, neighbour)

    async def _write(self, neighbour: _Neighbour) -> None:
        """Send what is queued. A task only while there is something to send: thousands of idle
        ones would cost a simulation more memory than all else."""
        try:
            while neighbour.outbox:
                frames, neighbour.outbox = neighbour.outbox, []
                for frame in frames:
                    await neighbour.stream.send(frame)
        except StreamError as error:
            self._events.emit("gossip.neighbour_lost", remote=neighbour.peer, reason=str(error))
            neighbour.scope.cancel()
        finally:
            neighbour.writing = False

    async def _read(self, neighbour: _Neighbour) -> None:
        while (raw := await neighbour.stream.receive()) is not None:
            frame = _decoder.decode(raw)
            if isinstance(frame, _Push):
                self._receive(neighbour, frame.envelope)
            elif isinstance(frame, _Have):
                for digest in frame.digests:
                    neighbour.learn(digest)
                wanted = [d for d in frame.digests if not self._holds(d)]
                if wanted:
                    self._post(neighbour, _Want(wanted))
            elif isinstance(frame, _Want):
                self._answer(neighbour, frame.digests)
            elif frame.run != self._run:
                return
            else:
                self._greet(neighbour, frame)
            if neighbour.invalid >= defaults.GOSSIP_INVALID_MAX:
                self._events.emit("gossip.neighbour_banned", remote=neighbour.peer)
                self._transport.ban(neighbour.peer, defaults.GOSSIP_BAN_SECONDS)
                return

    def _greet(self, neighbour: _Neighbour, hello: _Hello) -> None:
        neighbour.topics = frozenset(hello.topics)
        self._refusals.pop(neighbour.peer, None)
        self._compare_clock(neighbour.peer, hello.wall_ms / 1000 - self._world.wall_time())
        for raw in hello.records:
            try:
                record = open_envelope(raw)
            except Dropped:
                neighbour.invalid += 1
                continue
            if isinstance(record.message, PeerRecord):
                self._learn_record(record)
        self._offer(neighbour, _by_topic(self._current()))

    # --- envelopes ---------------------------------------------------------------------------

    def _holds(self, digest: bytes) -> bool:
        return digest in self._store or digest in self._lasting

    def _receive(self, neighbour: _Neighbour, raw: bytes) -> None:
        try:
            if type(open_envelope(raw).message) not in TOPICS:  # before the gate remembers it
                neighbour.invalid += 1
                return
            envelope = self._gate.admit(raw)
        except Dropped as dropped:
            if dropped.cause == "duplicate":
                neighbour.learn(open_envelope(raw).digest)
            elif dropped.cause == "over_rate":
                if len(neighbour.late) < defaults.GOSSIP_STORE_MAX:
                    neighbour.late[open_envelope(raw).digest] = None
            elif dropped.cause in ("bad_signature", "malformed", "too_large", "wrong_run"):
                neighbour.invalid += 1
            return
        neighbour.learn(envelope.digest)
        self._accept(envelope, came_from=neighbour)

    def _accept(self, envelope: Envelope, came_from: _Neighbour | None) -> None:
        if isinstance(envelope.message, _LASTING):
            self._lasting[envelope.digest] = envelope
        self._store[envelope.digest] = envelope
        if len(self._store) > defaults.GOSSIP_STORE_MAX:
            self._store.popitem(last=False)
        self._fresh.append(envelope)
        self._spread(envelope)
        for listener in self._listeners.get(type(envelope.message), ()):
            listener(envelope)

    def _spread(self, envelope: Envelope) -> None:
        topic = TOPICS[type(envelope.message)]
        candidates = [
            neighbour
            for neighbour in self._neighbours.values()
            if topic in neighbour.topics and envelope.digest not in neighbour.knows
        ]
        if len(candidates) > defaults.GOSSIP_EAGER:
            candidates = self._world.random.sample(candidates, defaults.GOSSIP_EAGER)
        for neighbour in candidates:
            neighbour.learn(envelope.digest)
            self._post(neighbour, _Push(envelope.raw))

    def _answer(self, neighbour: _Neighbour, digests: Sequence[bytes]) -> None:
        states = {envelope.digest: envelope for envelope in self._gate.states()}
        for digest in digests:
            envelope = self._store.get(digest) or self._lasting.get(digest) or states.get(digest)
            if envelope is not None:
                neighbour.learn(digest)
                self._post(neighbour, _Push(envelope.raw))

    def _current(self) -> list[Envelope]:
        """What a neighbour should hold: recent events, newest states, lasting events."""
        wall_ms = int(self._world.wall_time() * 1000)
        states = [e for e in self._gate.states() if type(e.message) in TOPICS]
        events = [
            envelope
            for envelope in [*self._lasting.values(), *self._store.values()]
            if not isinstance(envelope.message, StateMessage) and envelope.body.expires_ms > wall_ms
        ]
        return list({e.digest: e for e in states + events}.values())

    def _offer(self, neighbour: _Neighbour, digests: Mapping[str, Sequence[bytes]]) -> None:
        """Tell a neighbour those digests, given by topic, that it may lack."""
        knows = neighbour.knows
        missing = [
            digest
            for topic, some in digests.items()
            if topic in neighbour.topics
            for digest in some
            if digest not in knows
        ]
        for start in range(0, len(missing), defaults.GOSSIP_DIGESTS_MAX):
            chunk = missing[start : start + defaults.GOSSIP_DIGESTS_MAX]
            for digest in chunk:
                neighbour.learn(digest)
            self._post(neighbour, _Have(chunk))

    def _ask_again(self, neighbour: _Neighbour) -> None:
        """Ask for what came too fast: whoever was away for a while is offered all of it at once,
        and what a neighbour has sent it does not offer a second time."""
        chunk = list(neighbour.late)[:_LATE_PER_TICK]
        for digest in chunk:
            del neighbour.late[digest]
        wanted = [digest for digest in chunk if not self._holds(digest)]
        if wanted:
            self._post(neighbour, _Want(wanted))

    async def _tick(self, nursery: trio.Nursery) -> None:
        while True:
            await trio.sleep(defaults.GOSSIP_TICK_SECONDS)
            fresh = _by_topic(self._fresh)
            self._fresh.clear()
            for neighbour in self._neighbours.values():
                if fresh:
                    self._offer(neighbour, fresh)
                if neighbour.late:
                    self._ask_again(neighbour)
            if self._open_at <= self._world.now():
                self._open_more(nursery)


def _by_topic(envelopes: Sequence[Envelope]) -> dict[str, list[bytes]]:
    """Their digests."""
    found: dict[str, list[bytes]] = {}
    for envelope in envelopes:
        found.setdefault(TOPICS[type(envelope.message)], []).append(envelope.digest)
    return found
