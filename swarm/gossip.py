"""Epidemic announcements of one run: signed envelopes only, to everyone who follows their topic.

Protocol `/swarm/gossip/1.0.0`, framing SWARM, one stream per pair of neighbours, opened by the
peer whose id sorts first. Frames are msgpack arrays whose first element is a tag:

- `hello`: run id, wall time in ms, topics followed, some peer records (so that a
  newcomer finds neighbours), the sender's admission if it has one;
- `admission`: the sender's admission, once it has one, and renewed now and then;
- `push`: one envelope;
- `have`: digests of envelopes the sender holds;
- `want`: digests of those the receiver of a `have` lacks; answered with `push`.

A new envelope is pushed at once to `GOSSIP_EAGER` neighbours that follow its topic and are not
known to hold it, and offered by digest to the others on the next tick. On `hello` neighbours offer
each other all they hold, the newest states first (anti-entropy; Demers et al. 1987, eager/lazy as
in Plumtree, Leitão et al. 2007).

Nothing waits in line as bytes: what a neighbour is owed is remembered by digest, news before what
it asked for, and becomes a frame when the stream takes one. So a peer that comes back to ten
thousand announcements gets them at the pace of its line, and the newest order before them.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import trio
from blake3 import blake3
from msgspec import Meta

from swarm import defaults
from swarm.envelope import FORGED, Dropped, Envelope, Gate, open_envelope
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
    Verdict,
)
from swarm.transport import Stream, StreamError, Transport
from swarm.world import World

PROTOCOL = "/swarm/gossip/1.0.0"

DROPPED_TOLD_SECONDS = 60.0
"""Between two counts of what was not believed, by cause."""

RUN = "run"
WORK = "work"
TOPICS: dict[type[Message], str] = {
    RunManifest: RUN,
    Checkpoint: RUN,
    StepOrder: RUN,
    Eviction: RUN,
    Reinstatement: RUN,
    Acknowledgement: WORK,
    Verdict: WORK,
    Presence: WORK,
    LogHead: WORK,
}
"""Which topic carries a message. What is not listed is never gossiped. Only the owner and trusted
peers may say any of these (`Run.permits`), so no stranger can make others pass on or keep a thing.
"""

_STATES_FIRST = (RunManifest, Checkpoint, StepOrder, LogHead, Presence)
"""In this order a neighbour is offered the newest states; evictions and events follow."""

_LASTING = (Eviction, Reinstatement)
"""Events that newcomers must learn of, however long ago they happened."""

STRANGER, ADMITTED, TRUSTED = range(3)
"""Ranks of neighbours."""

_Raw = Annotated[bytes, Meta(max_length=defaults.ENVELOPE_BYTES_MAX)]
_Digests = Annotated[list[Digest], Meta(max_length=defaults.GOSSIP_DIGESTS_MAX)]


class _Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    run: Name
    wall_ms: Annotated[int, Meta(ge=0, le=2**53)]
    topics: Annotated[list[Annotated[str, Meta(max_length=20)]], Meta(max_length=8)]
    records: Annotated[list[_Raw], Meta(max_length=defaults.GOSSIP_RECORDS_EXCHANGED)]
    admission: _Raw = b""


class _Shown(msgspec.Struct, array_like=True, frozen=True, tag="admission"):
    admission: _Raw


class _Push(msgspec.Struct, array_like=True, frozen=True, tag="push"):
    envelope: _Raw


class _Have(msgspec.Struct, array_like=True, frozen=True, tag="have"):
    digests: _Digests


class _Want(msgspec.Struct, array_like=True, frozen=True, tag="want"):
    digests: _Digests


_Frame = _Hello | _Shown | _Push | _Have | _Want
_decoder = msgspec.msgpack.Decoder(_Frame)
_encoder = msgspec.msgpack.Encoder()


class _Kept(NamedTuple):
    """An announcement as it is held for neighbours that lack it."""

    raw: bytes
    topic: str
    expires_ms: int


class _Refusal:
    """That a peer would not talk."""

    def __init__(self) -> None:
        self.times = 0
        self.retry_at = 0.0
        self.full = False
        """It has neighbours enough: it would refuse over a new connection, too."""


class _Remembered(OrderedDict[bytes, None]):
    """The last digests that were added, in that order, and no more than `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def add(self, digest: bytes) -> None:
        self[digest] = None
        self.move_to_end(digest)
        if len(self) > self._most:
            self.popitem(last=False)


class _Neighbour:
    """A peer with an open gossip stream, and what it is known to hold."""

    def __init__(self, stream: Stream, *, opened: bool, range_: str, now: float) -> None:
        self.stream = stream
        self.peer = stream.peer
        self.opened = opened
        """By this side."""
        self.range = range_
        """Of public addresses, or empty."""
        self.since = now
        """When it came, or stopped being admitted."""
        self.admitted_until = 0.0
        self.follows: frozenset[str] = frozenset()
        self.topics: frozenset[str] = frozenset()
        """Of those that it follows, what it is told."""
        self.knows = _Remembered(2 * defaults.GOSSIP_STORE_MAX)
        self.invalid = 0
        self.clock: float | None = None
        """Its wall time less this world's clock, as it greeted."""
        self.scope = trio.CancelScope()
        self.outbox: deque[_Frame] = deque()
        """Frames that go before anything below."""
        self.news = _Remembered(defaults.GOSSIP_STORE_MAX)
        """What it is to be told, in this order."""
        self.wanted = _Remembered(defaults.GOSSIP_STORE_MAX)
        """What it asked for, in its order; sent when there is no news."""
        self.answer_bytes = defaults.ENVELOPE_BYTES_MAX
        """Of them it may have until the next tick, unless it is trusted: it may ask for the same
        again and again, and begin as many conversations."""
        self.offers = _Remembered(defaults.GOSSIP_STORE_MAX)
        """What it offered and a trusted neighbour is about to bring."""
        self.writing = False


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
        admits: Callable[[PeerId, bytes], bool],
        compare_clock: Callable[[PeerId, float], None] = lambda _peer, _seconds: None,
    ) -> None:
        """`records` gives peer records to hand to newcomers; `learn_record` takes theirs
        (signature checked); `admits` says whether a peer takes part, going by the admission that it
        shows; `compare_clock` hears how far ahead a neighbour's clock is."""
        self._transport = transport
        self._world = world
        self._gate = gate
        self._events = events
        self._run = run
        self._topics = frozenset(topics)
        self._records = records
        self._learn_record = learn_record
        self._admits = admits
        self._compare_clock = compare_clock
        self._admission = b""
        """This peer's own, as it was shown last."""
        self._shown_at = -math.inf
        self._trusts = gate.trusts
        self._neighbours: dict[PeerId, _Neighbour] = {}
        self._greeting: dict[PeerId, _Neighbour] = {}
        """Those that have not said `hello` yet: who they are decides whether they get a slot."""
        self._refusals: OrderedDict[PeerId, _Refusal] = OrderedDict()
        """Peers that would not talk, or that are to begin."""
        self._spent: OrderedDict[PeerId, float] = OrderedDict()
        """Strangers that had their time, and until when they get no other."""
        self._open_at = 0.0
        """When to look for peers to start a conversation with."""
        self._fresh: dict[str, list[bytes]] = {}
        """Accepted since the last tick, by topic."""
        self._store: OrderedDict[bytes, _Kept] = OrderedDict()
        """The last events, oldest first."""
        self._kept_bytes = 0
        self._lasting: OrderedDict[bytes, _Kept] = OrderedDict()
        """The last of those events, oldest first."""
        self._states: dict[bytes, _Kept] = {}
        self._newest: dict[tuple[int, str], bytes] = {}
        """Which of `_states` is the newest of each kind (by its place in `_STATES_FIRST`) and
        sender."""
        self._asked: dict[bytes, float] = {}
        """What a trusted neighbour was asked for, and until when nobody else is."""
        self._listeners: dict[type[Message], list[Listener]] = {}
        self._nursery: trio.Nursery | None = None

    def listen(self, message_type: type[Message], listener: Listener) -> None:
        """Call `listener` once for every new envelope of this type, own ones included."""
        self._listeners.setdefault(message_type, []).append(listener)

    def neighbours(self) -> list[PeerId]:
        return sorted(self._neighbours)

    def members(self) -> list[PeerId]:
        """Those neighbours that are trusted or admitted: the ones to rely on."""
        return sorted(n.peer for n in self._neighbours.values() if self._rank(n) > STRANGER)

    def show(self, admission: Envelope) -> None:
        """Take this peer's own admission, new or renewed, and show it to neighbours in time."""
        first_time = not self._admission
        self._admission = admission.raw
        if first_time:
            for refusal in self._refusals.values():
                refusal.full = False
                refusal.retry_at = 0.0
            self._open_at = 0.0
        if self._world.now() >= self._shown_at + defaults.GOSSIP_ADMITTED_SECONDS / 2:
            self._shown_at = self._world.now()
            for neighbour in list(self._neighbours.values()):
                self._post(neighbour, _Shown(admission.raw))

    def kept(self) -> int:
        """How many announcements are held for neighbours that lack them."""
        return len(self._store)

    def publish(self, envelope: Envelope) -> None:
        """Spread an own envelope, or one that came another way. A duplicate does nothing."""
        try:
            self._gate.admit(envelope.raw)
        except Dropped as dropped:
            if dropped.cause not in ("duplicate", "old_state"):
                raise
            # An event may have passed the gate as a request, and never have been gossiped.
            state = isinstance(envelope.message, StateMessage)
            if dropped.cause == "old_state" or state or self._held(envelope.digest) is not None:
                return
        self._accept(envelope)

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
            for peer in self._transport.connected():
                self._meet(peer)
            self._open_more(nursery)
            async for event in connections:
                if event.connected:
                    self._meet(event.peer)
                    if self._may_open(event.peer):
                        nursery.start_soon(self._open, event.peer)

    # --- neighbours --------------------------------------------------------------------------

    def _meet(self, peer: PeerId) -> None:
        """Decide whose turn it is to begin with a peer that was just connected."""
        refusal = self._refusals.get(peer)
        if refusal is not None and not refusal.full:
            del self._refusals[peer]
        if self._transport.peer_id > peer:
            self._refusal(peer).retry_at = self._world.now() + defaults.GOSSIP_YIELD_SECONDS

    def _refusal(self, peer: PeerId) -> _Refusal:
        refusal = self._refusals.setdefault(peer, _Refusal())
        if len(self._refusals) > defaults.GOSSIP_REFUSALS_MAX:
            self._refusals.popitem(last=False)
        return refusal

    def _rank(self, neighbour: _Neighbour) -> int:
        """What its slot is worth: whoever has none may take that of one with a lower rank."""
        if self._trusts(neighbour.peer):
            return TRUSTED
        return ADMITTED if neighbour.admitted_until > self._world.now() else STRANGER

    def _may_have(self, newcomer: _Neighbour) -> bool:
        """Whether there is a slot for a peer that has just said who it is; whoever is worth less
        gives its own up, or, of admitted peers, one from a range that has two more of them."""
        ranks = {neighbour.peer: self._rank(neighbour) for neighbour in self._neighbours.values()}
        rank, crowd = self._rank(newcomer), Counter(n.range for n in self._neighbours.values())
        if rank == STRANGER:
            strangers = [n for n in self._neighbours.values() if ranks[n.peer] == STRANGER]
            near = sum(n.range == newcomer.range != "" for n in strangers)
            if (
                len(strangers) >= defaults.GOSSIP_STRANGERS_MAX
                or near >= defaults.GOSSIP_STRANGERS_PER_RANGE_MAX
                or self._spent.get(newcomer.peer, 0.0) > self._world.now()
            ):
                return False
        if not self._is_full():
            return True
        others = [n for n in self._neighbours.values() if ranks[n.peer] < TRUSTED]
        if rank == STRANGER or not others:
            return False
        least = min(others, key=lambda n: (ranks[n.peer], -crowd[n.range], -n.since))
        if rank == ADMITTED:
            takes = ranks[least.peer] == STRANGER or crowd[least.range] > crowd[newcomer.range] + 1
        else:
            trusted = len(ranks) - len(others)
            takes = ranks[least.peer] == STRANGER or trusted < defaults.GOSSIP_TRUSTED_TAKE
        if takes:
            self._leave(least)
        return takes

    def _is_full(self) -> bool:
        return len(self._neighbours) >= defaults.GOSSIP_NEIGHBOURS_MAX

    def _has_room(self, peer: PeerId) -> bool:
        """Whether a peer that is not a neighbour might get a slot."""
        if not self._is_full() or self._trusts(peer):
            return True
        return any(self._rank(n) == STRANGER for n in self._neighbours.values())

    def _opens_at(self, peer: PeerId) -> float:
        """From when on a conversation is ours to start; inf if it is not, as things are."""
        yields = self._transport.peer_id > peer
        if (
            peer in self._neighbours
            or peer in self._greeting
            or (yields and not self._admission and not self._trusts(self._transport.peer_id))
            or not self._has_room(peer)
        ):
            return math.inf
        refusal = self._refusals.get(peer)
        if refusal is None:
            return 0.0
        enough = len(self._neighbours) >= defaults.GOSSIP_NEIGHBOURS_WANTED
        pause = 0.0
        if refusal.full and enough and not self._trusts(peer):
            pause = defaults.GOSSIP_FULL_SECONDS
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
        refusal = self._refusal(peer)
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
        await self._converse(stream, opened=True)

    async def _converse(self, stream: Stream, *, opened: bool = False) -> None:
        peer = stream.peer
        other = self._neighbours.get(peer) or self._greeting.get(peer)
        if other is not None:
            # Of two streams that cross, that of the lesser id stays; a second one of the same side
            # comes from a peer that has lost the first.
            lesser = self._transport.peer_id < peer
            crossed = opened != other.opened
            if lesser == other.opened if crossed else opened:
                await stream.reset()
                return
            self._leave(other)
        neighbour = self._greeting[peer] = _Neighbour(
            stream,
            opened=opened,
            range_=self._transport.network_of(peer),
            now=self._world.now(),
        )
        # Any of them: were it always the first, everybody would dial the same few peers.
        known = self._records()
        count = min(len(known), defaults.GOSSIP_RECORDS_EXCHANGED)
        records = [record.raw for record in self._world.random.sample(known, count)]
        wall_ms = int(self._world.wall_time() * 1000)
        self._post(
            neighbour,
            _Hello(self._run, wall_ms, sorted(self._topics), records, self._admission),
        )
        try:
            with neighbour.scope:
                if await self._is_greeted(neighbour):
                    await self._read(neighbour)
        except (StreamError, *DECODE_ERRORS) as error:
            self._events.emit("gossip.neighbour_lost", remote=peer, reason=str(error))
        finally:
            self._leave(neighbour)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.reset()

    async def _is_greeted(self, neighbour: _Neighbour) -> bool:
        """Whether the other side says who it is, and gets a slot."""
        raw = None
        with trio.move_on_after(defaults.GOSSIP_GREETING_SECONDS):
            raw = await neighbour.stream.receive()
        hello = _decoder.decode(raw) if raw is not None else None
        if not isinstance(hello, _Hello) or hello.run != self._run:
            return False
        if self._greeting.get(neighbour.peer) is not neighbour:
            return False  # another stream took its place meanwhile
        neighbour.follows = frozenset(hello.topics)
        self._look_at(neighbour, hello.admission)
        if not self._may_have(neighbour):
            return False
        del self._greeting[neighbour.peer]
        self._neighbours[neighbour.peer] = neighbour
        self._greet(neighbour, hello)
        return True

    def _look_at(self, neighbour: _Neighbour, admission: bytes) -> None:
        """Note whether a neighbour is admitted: strangers are told only of the run as a whole."""
        if self._admits(neighbour.peer, admission):
            neighbour.admitted_until = self._world.now() + defaults.GOSSIP_ADMITTED_SECONDS
            self._transport.vouch(neighbour.peer, defaults.GOSSIP_ADMITTED_SECONDS)
        stranger = self._rank(neighbour) == STRANGER
        neighbour.topics = neighbour.follows & {RUN} if stranger else neighbour.follows

    def _part_with_strangers(self) -> None:
        """Those that were not admitted for long keep a slot from others, and bring nothing."""
        now = self._world.now()
        for neighbour in list(self._neighbours.values()):
            if self._rank(neighbour) > STRANGER:
                continue
            if 0 < neighbour.admitted_until <= now:
                neighbour.since, neighbour.admitted_until = now, 0.0
                neighbour.topics = neighbour.follows & {RUN}
            elif now - neighbour.since > defaults.GOSSIP_STRANGER_SECONDS:
                self._spent[neighbour.peer] = now + defaults.GOSSIP_FULL_SECONDS
                if len(self._spent) > defaults.GOSSIP_REFUSALS_MAX:
                    self._spent.popitem(last=False)
                self._leave(neighbour)

    def _leave(self, neighbour: _Neighbour) -> None:
        """End a conversation."""
        for among in (self._neighbours, self._greeting):
            if among.get(neighbour.peer) is neighbour:
                del among[neighbour.peer]
        neighbour.scope.cancel()
        self._open_at = 0.0  # there is room again

    def _post(self, neighbour: _Neighbour, frame: _Frame) -> None:
        """Queue a frame; a neighbour too slow to take it is dropped, and may come back."""
        if len(neighbour.outbox) >= defaults.GOSSIP_OUTBOX_MAX:
            self._leave(neighbour)
            return
        neighbour.outbox.append(frame)
        self._wake(neighbour)

    def _wake(self, neighbour: _Neighbour) -> None:
        """Have what a neighbour is owed written."""
        assert self._nursery is not None
        if self._nursery.cancel_scope.cancel_called:
            neighbour.scope.cancel()
        elif not neighbour.writing:
            neighbour.writing = True
            self._nursery.start_soon(self._write, neighbour)

    async def _write(self, neighbour: _Neighbour) -> None:
        """Send what is owed. A task only while there is something to send: thousands of idle
        ones would cost a simulation more memory than all else."""
        try:
            while (frame := self._next_frame(neighbour)) is not None:
                await neighbour.stream.send(_encoder.encode(frame))
        except StreamError as error:
            self._events.emit("gossip.neighbour_lost", remote=neighbour.peer, reason=str(error))
            neighbour.scope.cancel()
        finally:
            neighbour.writing = False

    def _next_frame(self, neighbour: _Neighbour) -> _Frame | None:
        """What is most worth sending now; what has been forgotten meanwhile is left out."""
        if neighbour.outbox:
            return neighbour.outbox.popleft()
        served = neighbour.answer_bytes > 0 or self._trusts(neighbour.peer)
        for owed in (neighbour.news, neighbour.wanted) if served else (neighbour.news,):
            while owed:
                digest, _ = owed.popitem(last=False)
                kept = self._held(digest)
                if kept is not None:
                    neighbour.knows.add(digest)
                    if owed is neighbour.wanted:
                        neighbour.answer_bytes -= len(kept.raw)
                    return _Push(kept.raw)
        return None

    async def _read(self, neighbour: _Neighbour) -> None:
        while (raw := await neighbour.stream.receive()) is not None:
            frame = _decoder.decode(raw)
            if isinstance(frame, _Push):
                self._receive(neighbour, frame.envelope)
            elif isinstance(frame, _Have):
                for digest in frame.digests:
                    neighbour.knows.add(digest)
                self._ask(neighbour, frame.digests)
            elif isinstance(frame, _Want):
                for digest in frame.digests:
                    kept = self._held(digest)
                    if kept is not None and kept.topic in neighbour.topics:
                        neighbour.wanted.add(digest)
                self._wake(neighbour)
            elif isinstance(frame, _Shown):
                told = neighbour.topics
                self._look_at(neighbour, frame.admission)
                if neighbour.topics != told:
                    self._offer(neighbour, self._current())
            else:
                return  # it has said `hello` already
            if neighbour.invalid >= defaults.GOSSIP_INVALID_MAX:
                self._events.emit("gossip.neighbour_banned", remote=neighbour.peer)
                self._transport.ban(neighbour.peer, defaults.GOSSIP_BAN_SECONDS)
                return

    def _greet(self, neighbour: _Neighbour, hello: _Hello) -> None:
        self._refusals.pop(neighbour.peer, None)
        neighbour.clock = hello.wall_ms / 1000 - self._world.now()
        self._compare_clock(neighbour.peer, hello.wall_ms / 1000 - self._world.wall_time())
        for raw in hello.records:
            try:
                record = open_envelope(raw)
            except Dropped:
                neighbour.invalid += 1
                continue
            if isinstance(record.message, PeerRecord):
                self._learn_record(record)
        self._offer(neighbour, self._current())

    # --- envelopes ---------------------------------------------------------------------------

    def _held(self, digest: bytes) -> _Kept | None:
        return self._store.get(digest) or self._lasting.get(digest) or self._states.get(digest)

    def _receive(self, neighbour: _Neighbour, raw: bytes) -> None:
        digest = blake3(raw).digest()
        self._asked.pop(digest, None)
        neighbour.offers.pop(digest, None)
        if self._held(digest) is not None:  # the usual repetition, before anything is checked
            neighbour.knows.add(digest)
            return
        try:
            envelope = self._gate.admit(raw, TOPICS)
        except Dropped as dropped:
            if dropped.cause == "duplicate":
                neighbour.knows.add(digest)
            elif dropped.cause in FORGED or self._is_out_of_time(neighbour, dropped.cause, raw):
                neighbour.invalid += 1
            return
        neighbour.knows.add(envelope.digest)
        self._accept(envelope)

    def _is_out_of_time(self, neighbour: _Neighbour, cause: str, raw: bytes) -> bool:
        """Whether an envelope that has expired, or is of the future, is so by the neighbour's own
        clock too, and by far. Where clocks differ this peer's may be the wrong one."""
        if cause not in ("expired", "from_the_future") or neighbour.clock is None:
            return False
        theirs = self._world.now() + neighbour.clock
        body = open_envelope(raw).body
        return (
            body.expires_ms / 1000 < theirs - defaults.ENVELOPE_FUTURE_SECONDS_MAX
            or body.issued_ms / 1000
            > theirs + defaults.ENVELOPE_FUTURE_SECONDS_MAX + defaults.CLOCK_SKEW_SECONDS_MAX
        )

    def _accept(self, envelope: Envelope) -> None:
        digest, message = envelope.digest, envelope.message
        topic = TOPICS[type(message)]
        kept = _Kept(envelope.raw, topic, envelope.body.expires_ms)
        if isinstance(message, _LASTING):
            self._lasting[digest] = kept
            if len(self._lasting) > defaults.GOSSIP_STORE_MAX:
                self._lasting.popitem(last=False)
        elif isinstance(message, StateMessage):
            place = (_STATES_FIRST.index(type(message)), envelope.sender)
            self._states.pop(self._newest.get(place, b""), None)
            self._newest[place] = digest
            self._states[digest] = kept
        else:
            self._store[digest] = kept
            self._kept_bytes += len(kept.raw)
            self._forget_oldest()
        self._fresh.setdefault(topic, []).append(digest)
        self._spread(digest, topic)
        for listener in self._listeners.get(type(message), ()):
            listener(envelope)

    def _forget_oldest(self) -> None:
        wall_ms = int(self._world.wall_time() * 1000)
        while self._store and (
            len(self._store) > defaults.GOSSIP_STORE_MAX
            or self._kept_bytes > defaults.GOSSIP_STORE_BYTES_MAX
            or next(iter(self._store.values())).expires_ms <= wall_ms
        ):
            _, forgotten = self._store.popitem(last=False)
            self._kept_bytes -= len(forgotten.raw)

    def _spread(self, digest: bytes, topic: str) -> None:
        candidates = [
            neighbour
            for neighbour in self._neighbours.values()
            if topic in neighbour.topics
            and digest not in neighbour.knows
            and self._rank(neighbour) > STRANGER
        ]
        if len(candidates) > defaults.GOSSIP_EAGER:
            self._world.random.shuffle(candidates)
            candidates.sort(key=self._rank, reverse=True)
        for neighbour in candidates[: defaults.GOSSIP_EAGER]:
            neighbour.knows.add(digest)
            neighbour.news.add(digest)
            self._wake(neighbour)

    def _current(self) -> dict[str, list[bytes]]:
        """Digests of what a neighbour should hold, by topic: the newest states, lasting events,
        then the others, each newest first, since an old one is worth the least."""
        wall_ms = int(self._world.wall_time() * 1000)
        digests = [digest for _, digest in sorted(self._newest.items())]
        digests += [*reversed(self._lasting), *reversed(self._store)]
        found: dict[str, list[bytes]] = {RUN: []}
        for digest in digests:
            kept = self._held(digest)
            assert kept is not None
            if kept.expires_ms > wall_ms:
                found.setdefault(kept.topic, []).append(digest)
        return found

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
        for digest in missing:
            knows.add(digest)
        for chunk in _chunks(missing):
            self._post(neighbour, _Have(chunk))

    def _ask(self, neighbour: _Neighbour, digests: Iterable[bytes]) -> None:
        """Ask for those of its offers that are lacking, but for those that a trusted neighbour was
        just asked for: whoever comes back is offered the same by everybody. Others may be asked
        all the same, since they may never answer."""
        now = self._world.now()
        trusted = self._trusts(neighbour.peer)
        wanted = []
        for digest in digests:
            if self._held(digest) is not None:
                continue
            if self._asked.get(digest, now) > now:
                neighbour.offers.add(digest)
                continue
            wanted.append(digest)
            if trusted:
                self._asked[digest] = now + defaults.GOSSIP_ANSWER_SECONDS
        for chunk in _chunks(wanted):
            self._post(neighbour, _Want(chunk))

    async def _tick(self, nursery: trio.Nursery) -> None:
        told: Counter[str] = Counter()
        tell_at = self._world.now() + DROPPED_TOLD_SECONDS
        while True:
            await trio.sleep(defaults.GOSSIP_TICK_SECONDS)
            if self._world.now() >= tell_at:
                causes, told = self._gate.dropped - told, self._gate.dropped.copy()
                tell_at = self._world.now() + DROPPED_TOLD_SECONDS
                del causes["duplicate"]  # the usual repetition
                if causes:
                    self._events.emit("gossip.dropped", causes=dict(sorted(causes.items())))
            fresh, self._fresh = self._fresh, {}
            for neighbour in list(self._neighbours.values()):
                if fresh:
                    self._offer(neighbour, fresh)
                if neighbour.offers:
                    offers = list(neighbour.offers)
                    neighbour.offers.clear()
                    self._ask(neighbour, offers)
                neighbour.answer_bytes = defaults.GOSSIP_ANSWER_BYTES_PER_TICK
                if neighbour.wanted:
                    self._wake(neighbour)
            if self._asked:
                now = self._world.now()
                self._asked = {d: until for d, until in self._asked.items() if until > now}
            self._forget_oldest()
            self._part_with_strangers()
            if self._open_at <= self._world.now():
                self._open_more(nursery)


def _chunks(digests: Sequence[bytes]) -> Iterable[list[bytes]]:
    """As many as fit a frame at a time."""
    for start in range(0, len(digests), defaults.GOSSIP_DIGESTS_MAX):
        yield list(digests[start : start + defaults.GOSSIP_DIGESTS_MAX])
