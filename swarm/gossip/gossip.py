"""The gossip of one peer: conversations with its neighbours, and the spreading of envelopes."""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import trio
from blake3 import blake3

from swarm.errors import DECODE_ERRORS, UserError
from swarm.events import Events
from swarm.gossip import topics as frames
from swarm.gossip.slots import NEIGHBOURS_MAX, STRANGER, Neighbour, Slots
from swarm.gossip.store import Store
from swarm.transport import Stream, StreamError, Transport
from swarm.transport.rates import TokenBuckets
from swarm.wire import envelope as envelopes
from swarm.wire.identity import PeerId
from swarm.wire.messages import Message, PeerRecord, StateMessage
from swarm.wire.messenger import REQUEST_DEADLINE_SECONDS
from swarm.world.observable import Observable

TICK_SECONDS = 1.0
"""Between two rounds in which every neighbour is offered the newest announcements by digest."""

EAGER = 6
"""Neighbours to which an announcement is pushed at once; the others get its digest."""

OFFERED = 8
"""Neighbours to which the newest heartbeats are offered in a tick: most have them by then, so that
60 trainers with 32 neighbours each would send each other thousands of needless frames a second."""

SUPPLIED_SECONDS = 300.0
"""A neighbour that has routine announcements from elsewhere as early gets digests of that sender's
next ones for this long, or until it asks for one: each sender's then spread along a tree (Plumtree,
Leitão et al. 2007), and who loses its place in it takes another one within some ticks."""

ADMITTED_SECONDS = 600.0
"""Time for which an admission shown to a neighbour counts for its slot. (It was valid when it was
shown; an evicted peer is disconnected at once.) It is shown again after half of that."""

GREETING_SECONDS = 10.0
"""A conversation without `hello` from the other side ends after this long."""

OUTBOX_MAX = 256
"""Frames waiting for one slow neighbour; beyond it the neighbour is dropped and rejoins. A whole
store is offered in 32 frames; announcements wait as digests and do not count."""

ANSWER_SECONDS = 3.0
"""After a trusted neighbour was asked for an announcement, no other neighbour is asked for it for
this long: a trusted neighbour delivers about 3,000 announcements a second."""

ANSWER_BYTES_PER_TICK = 256 * 1024
"""Bytes of announcements that an untrusted neighbour gets per tick: about 500 of them."""

DROPPED_REPORT_SECONDS = 60.0
"""Between two reports of the number of dropped envelopes, by cause."""

UNKNOWN_PER_SECOND = 10.0
"""Average number of messages per second that a neighbour may send whose kind this version does not
know. A newer peer sends some, and this one cannot tell it to stop."""

UNKNOWN_BURST = 200.0
"""Number of these at once: what a newer neighbour holds when the conversation begins."""

Listener = Callable[[envelopes.Envelope], None]


class Gossip:
    """Spreads a run's announcements to and from the neighbours of one peer."""

    def __init__(
        self,
        transport: Transport,
        gate: envelopes.Gate,
        events: Events,
        topics: Sequence[str],
        *,
        records: Callable[[int], Sequence[envelopes.Envelope]],
        learn_record: Callable[[envelopes.Envelope], None],
        admits: Callable[[PeerId, bytes], bool],
    ) -> None:
        """`records(most)`: some peer records to send to newcomers. `learn_record(record)`: receives
        theirs, with checked signatures. `admits(peer, admission)`: whether that is valid."""
        self._transport = transport
        self._world = gate.world
        self._run = gate.run
        self._gate = gate
        self._events = events
        self._topics = frozenset(topics)
        self._records = records
        self._learn_record = learn_record
        self._admits = admits
        self.compare_clock: Callable[[PeerId, float], None] = lambda peer, seconds: None
        """Called with how far ahead a neighbour's clock is, in seconds."""
        self._admission = b""
        """This peer's own admission."""
        self._shown_at = -math.inf
        self._slots = Slots(transport, gate.world, gate.trusts)
        self._store = Store(gate.world)
        self._fresh: dict[str, list[bytes]] = {}
        """Digests of envelopes accepted since the last tick, by topic; without heartbeats."""
        self._beats: deque[list[bytes]] = deque([[]], maxlen=NEIGHBOURS_MAX // OFFERED + 1)
        """Digests of the heartbeats of the last ticks, the newest last."""
        self._asked: dict[bytes, float] = {}
        """Digests that a trusted neighbour was asked for, and until when no other is asked."""
        self._unknown = TokenBuckets(
            UNKNOWN_PER_SECOND, UNKNOWN_BURST, envelopes.SENDERS_REMEMBERED_MAX
        )
        """Messages of unknown kinds, by the neighbour that sends them."""
        self._listeners: dict[type[Message], list[Listener]] = {}
        self._sent = Observable(None)
        """Changes when a neighbour's queue is empty."""
        self._nursery: trio.Nursery | None = None

    def listen(self, message_type: type[Message], listener: Listener) -> None:
        """Call `listener` once for every new envelope of this type, own ones included.

        Raises `UserError` for a type that does not travel by gossip."""
        if message_type not in frames.TOPICS:
            raise UserError(
                f"{message_type.__name__} messages do not travel by gossip; listen to one of "
                + ", ".join(sorted(each.__name__ for each in frames.TOPICS))
            )
        self._listeners.setdefault(message_type, []).append(listener)

    def neighbours(self) -> list[PeerId]:
        return sorted(self._slots.neighbours)

    def members(self) -> list[PeerId]:
        """Neighbours that are trusted or admitted, sorted."""
        return self._slots.members()

    def is_refused_by(self, peer: PeerId) -> bool:
        """Whether a peer had no slot for this one lately."""
        return self._slots.is_refused_by(peer)

    def show(self, admission: envelopes.Envelope) -> None:
        """Store this peer's own admission, new or renewed, and show it to neighbours if due."""
        first_time = not self._admission
        self._admission = admission.raw
        if first_time:
            self._slots.set_admitted()
        if self._world.now() >= self._shown_at + ADMITTED_SECONDS / 2:
            self._shown_at = self._world.now()
            # To one that has yet to answer, this peer's `hello` came without an admission: for a
            # minute it would be a stranger there, and get nothing but the run's own news.
            greeted = [each for each in self._slots.greeting.values() if each.opened]
            for neighbour in [*self._slots.neighbours.values(), *greeted]:
                self._post(neighbour, frames.Shown(admission.raw))

    def kept(self) -> int:
        """Number of events held for neighbours that lack them."""
        return len(self._store)

    def publish(self, envelope: envelopes.Envelope) -> None:
        """Spread an own envelope, or one received outside gossip.

        A duplicate does nothing, nor does an envelope above its sender's rate."""
        try:
            self._gate.admit(envelope.raw)
        except envelopes.Dropped as dropped:
            if dropped.cause == "over_rate":
                return
            if dropped.cause not in ("duplicate", "old_state"):
                raise
            # An event may have passed the gate as a request without being gossiped.
            is_state = isinstance(envelope.message, StateMessage)
            if is_state or self._store.get(envelope.digest) is not None:
                return
        self._accept(envelope)

    async def flush(self) -> None:
        """Wait until what is queued for the neighbours has been handed to their streams."""
        neighbours = self._slots.neighbours
        await self._sent.wait_until(lambda _: not any(n.writing for n in neighbours.values()))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a stream with every connected neighbour until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            connections = self._transport.connection_events()
            self._transport.serve(
                frames.PROTOCOL, self._converse, frame_bytes_max=frames.FRAME_BYTES_MAX
            )
            nursery.start_soon(self._tick, nursery)
            task_status.started()
            for peer in self._transport.connected():
                self._slots.meet(peer)
            self._open_more(nursery)
            async for event in connections:
                if event.connected:
                    self._slots.meet(event.peer)
                    if self._slots.may_open(event.peer):
                        nursery.start_soon(self._open, event.peer)

    # --- conversations -----------------------------------------------------------------------

    def _open_more(self, nursery: trio.Nursery) -> None:
        """Start conversations with connected peers: with the trusted ones, and random others."""
        slots, now = self._slots, self._world.now()
        slots.open_at = math.inf
        lacks = slots.lacks()
        due: list[PeerId] = []
        for peer in self._transport.connected():
            trusted = slots.trusts(peer)
            if not trusted and lacks <= 0:
                continue  # when a conversation or an attempt ends, it is looked at again
            opens_at = slots.opens_at(peer)
            if opens_at > now:
                slots.open_at = min(slots.open_at, opens_at)
            elif trusted:
                nursery.start_soon(self._open, peer)
            else:
                due.append(peer)
        for peer in self._world.random.sample(due, min(len(due), max(0, lacks))):
            nursery.start_soon(self._open, peer)

    async def _open(self, peer: PeerId) -> None:
        if not self._slots.may_open(peer):
            return  # other peers took the slots meanwhile
        refusal = self._slots.attempt(peer)
        try:
            with trio.fail_after(REQUEST_DEADLINE_SECONDS):
                stream = await self._transport.open_stream(peer, frames.PROTOCOL)
            refusal.full = True  # until the peer greets
            await self._converse(stream, opened=True)
        except (StreamError, trio.TooSlowError) as error:
            self._events.emit("gossip.not_spoken", remote=peer, reason=str(error))
        finally:
            self._slots.opened(peer)

    async def _converse(self, stream: Stream, *, opened: bool = False) -> None:
        peer = stream.peer
        other = self._slots.neighbours.get(peer) or self._slots.greeting.get(peer)
        if other is not None:
            # If both sides opened a stream at once, the one opened by the lesser id stays. A second
            # stream opened by the same side means that it has lost the first.
            lesser = self._transport.peer_id < peer
            crossed = opened != other.opened
            older_stays = lesser == other.opened if crossed else opened
            if older_stays:
                await stream.reset()
                return
            self._slots.leave(other)
        neighbour = self._slots.greeting[peer] = Neighbour(
            stream, opened=opened, range_=self._transport.network_of(peer), now=self._world.now()
        )
        if opened:
            self._say_hello(neighbour)
        try:
            with neighbour.scope:
                if await self._is_greeted(neighbour):
                    await self._read(neighbour)
        except (StreamError, *DECODE_ERRORS) as error:
            self._events.emit("gossip.neighbour_lost", remote=peer, reason=str(error))
        finally:
            self._slots.leave(neighbour)
            await stream.reset()

    def _say_hello(self, neighbour: Neighbour) -> None:
        """Greet: the side that was asked does so only once it has given a slot, so that its `hello`
        never comes with a refusal."""
        # A random sample: if all peers sent the same records, all would dial the same few peers.
        records = [record.raw for record in self._records(frames.RECORDS_EXCHANGED)]
        wall_ms = int(self._world.wall_time() * 1000)
        self._post(
            neighbour,
            frames.Hello(self._run, wall_ms, sorted(self._topics), records, self._admission),
        )

    async def _is_greeted(self, neighbour: Neighbour) -> bool:
        """Whether the other side sends a valid `hello` and gets a slot."""
        raw = None
        with trio.move_on_after(GREETING_SECONDS):
            raw = await neighbour.stream.receive()
        hello = frames.decode(raw) if raw is not None else None
        if not isinstance(hello, frames.Hello) or hello.run != self._run:
            return False
        if self._slots.greeting.get(neighbour.peer) is not neighbour:
            return False  # another stream replaced it meanwhile
        neighbour.follows = frozenset(hello.topics)
        self._look_at(neighbour, hello.admission)
        if not self._slots.may_have(neighbour):
            return False
        self._slots.take(neighbour)
        if not neighbour.opened:
            self._say_hello(neighbour)
        self._greet(neighbour, hello)
        return True

    def _greet(self, neighbour: Neighbour, hello: frames.Hello) -> None:
        neighbour.clock = hello.wall_ms / 1000 - self._world.now()
        self.compare_clock(neighbour.peer, hello.wall_ms / 1000 - self._world.wall_time())
        for raw in hello.records:
            try:
                record = envelopes.open_envelope(raw)
            except envelopes.Dropped:
                neighbour.invalid += 1
                continue
            if isinstance(record.message, PeerRecord):
                self._learn_record(record)
        self._offer(neighbour, self._store.current())

    def _look_at(self, neighbour: Neighbour, admission: bytes) -> None:
        """Note whether a neighbour is admitted: strangers get only the topic `run`."""
        if self._admits(neighbour.peer, admission):
            neighbour.admitted_until = self._world.now() + ADMITTED_SECONDS
            self._transport.vouch(neighbour.peer, ADMITTED_SECONDS)
        stranger = self._slots.rank(neighbour) == STRANGER
        neighbour.topics = neighbour.follows & {frames.RUN} if stranger else neighbour.follows

    async def _read(self, neighbour: Neighbour) -> None:
        while (raw := await neighbour.stream.receive()) is not None:
            frame = frames.decode(raw)
            if isinstance(frame, frames.Push):
                self._receive(neighbour, frame.envelope)
            elif isinstance(frame, frames.Have):
                for digest in frame.digests:
                    neighbour.knows[digest] = None
                    if digest in neighbour.pushed and (kept := self._store.get(digest)) is not None:
                        self._note_supplied(neighbour, kept.sender)
                self._ask(neighbour, frame.digests)
            elif isinstance(frame, frames.Want):
                for digest in frame.digests:
                    kept = self._store.get(digest)
                    if kept is not None and kept.topic in neighbour.topics:
                        neighbour.wanted[digest] = None
                        neighbour.supplied_until.pop(kept.sender, None)
                self._wake(neighbour)
            elif isinstance(frame, frames.Shown):
                topics = neighbour.topics
                self._look_at(neighbour, frame.admission)
                if neighbour.topics != topics:
                    self._offer(neighbour, self._store.current())
            else:
                return  # a second `hello` breaks the protocol
            if neighbour.invalid >= envelopes.INVALID_MAX:
                self._events.emit("gossip.neighbour_banned", remote=neighbour.peer)
                self._transport.ban(neighbour.peer, envelopes.BAN_SECONDS)
                return

    # --- sending -----------------------------------------------------------------------------

    def _post(self, neighbour: Neighbour, frame: frames.Frame) -> None:
        """Queue a frame; a neighbour with a full queue is dropped, and may rejoin."""
        if len(neighbour.outbox) >= OUTBOX_MAX:
            self._slots.leave(neighbour)
            return
        neighbour.outbox.append(frame)
        self._wake(neighbour)

    def _wake(self, neighbour: Neighbour) -> None:
        assert self._nursery is not None
        if self._nursery.cancel_scope.cancel_called:
            neighbour.scope.cancel()
        elif not neighbour.writing:
            neighbour.writing = True
            self._nursery.start_soon(self._write, neighbour)

    async def _write(self, neighbour: Neighbour) -> None:
        """Send queued frames until none is left.

        The task ends then: thousands of idle tasks would take most of a simulation's memory."""
        try:
            while (frame := self._next_frame(neighbour)) is not None:
                await neighbour.stream.send(frames.encode(frame))
        except StreamError as error:
            self._events.emit("gossip.neighbour_lost", remote=neighbour.peer, reason=str(error))
            neighbour.scope.cancel()
        finally:
            neighbour.writing = False
            self._sent.touch()

    def _next_frame(self, neighbour: Neighbour) -> frames.Frame | None:
        """The frame to send next: queued frames, then news, then answers.

        Envelopes that the store has dropped meanwhile are skipped."""
        if neighbour.outbox:
            return neighbour.outbox.popleft()
        served = neighbour.answer_bytes > 0 or self._slots.trusts(neighbour.peer)
        for owed in (neighbour.news, neighbour.wanted) if served else (neighbour.news,):
            while owed:
                digest, _ = owed.popitem(last=False)
                kept = self._store.get(digest)
                if kept is not None:
                    neighbour.knows[digest] = None
                    if owed is neighbour.wanted:
                        neighbour.answer_bytes -= len(kept.raw)
                    return frames.Push(kept.raw)
        return None

    # --- envelopes ---------------------------------------------------------------------------

    def _receive(self, neighbour: Neighbour, raw: bytes) -> None:
        digest = blake3(raw).digest()
        self._asked.pop(digest, None)
        neighbour.offers.pop(digest, None)
        held = self._store.get(digest)
        if held is not None:  # skip the usual duplicates before any check
            neighbour.knows[digest] = None
            if digest in neighbour.pushed:  # both copies crossed: each has another source
                self._note_supplied(neighbour, held.sender)
            elif held.routine:
                self._post(neighbour, frames.Have([digest]))  # it need not send the next ones
            return
        try:
            envelope = self._gate.admit(raw, frames.TOPICS)
        except envelopes.Dropped as dropped:
            if dropped.cause == "duplicate":
                neighbour.knows[digest] = None
            elif (
                dropped.cause in envelopes.FORGED
                or self._is_out_of_time(neighbour, dropped.cause, raw)
                # A newer peer may send some messages of unknown kinds.
                or (
                    dropped.cause == "unknown_kind"
                    and not self._unknown.of(neighbour.peer).take(1, self._world.now())
                )
            ):
                neighbour.invalid += 1
            return
        neighbour.knows[envelope.digest] = None
        self._accept(envelope)

    def _note_supplied(self, neighbour: Neighbour, sender: str) -> None:
        """Note that a neighbour has a sender's routine announcements from elsewhere."""
        neighbour.supplied_until[sender] = self._world.now() + SUPPLIED_SECONDS

    def _is_out_of_time(self, neighbour: Neighbour, cause: str, raw: bytes) -> bool:
        """Whether an envelope is expired, or from the future, by the neighbour's clock too, and by
        far. Where clocks differ, this peer's own may be wrong."""
        if cause not in ("expired", "from_the_future") or neighbour.clock is None:
            return False
        theirs = self._world.now() + neighbour.clock
        body = envelopes.open_envelope(raw).body
        return (
            body.expires_ms / 1000 < theirs - envelopes.FUTURE_SECONDS_MAX
            or body.issued_ms / 1000
            > theirs + envelopes.FUTURE_SECONDS_MAX + envelopes.CLOCK_SKEW_SECONDS_MAX
        )

    def _accept(self, envelope: envelopes.Envelope) -> None:
        topic, digest = self._store.add(envelope), envelope.digest
        beats = isinstance(envelope.message, frames.HEARTBEATS)
        (self._beats[-1] if beats else self._fresh.setdefault(topic, [])).append(digest)
        self._spread(envelope, topic)
        for listener in self._listeners.get(type(envelope.message), ()):
            listener(envelope)

    def _spread(self, envelope: envelopes.Envelope, topic: str) -> None:
        """Push an announcement to the neighbours that need it; the others get its digest."""
        digest, sender, now = envelope.digest, envelope.sender, self._world.now()
        routine = isinstance(envelope.message, frames.ROUTINE)
        lacking = [
            neighbour
            for neighbour in self._slots.neighbours.values()
            if not (routine and neighbour.supplied_until.get(sender, now) > now)
            and digest not in neighbour.knows
            and topic in neighbour.topics
        ]
        ranked = [(self._slots.rank(neighbour), neighbour) for neighbour in lacking]
        candidates = [each for each in ranked if each[0] > STRANGER]
        if len(candidates) > EAGER:
            self._world.random.shuffle(candidates)
            candidates.sort(key=lambda each: each[0], reverse=True)
            for _, neighbour in candidates[EAGER:] if routine else ():
                self._note_supplied(neighbour, sender)  # by one of its other neighbours
        for _, neighbour in candidates[:EAGER]:
            neighbour.knows[digest] = None
            neighbour.news[digest] = None
            if routine:
                neighbour.pushed[digest] = None
            self._wake(neighbour)

    def _offer(self, neighbour: Neighbour, digests: Mapping[str, Sequence[bytes]]) -> None:
        knows = neighbour.knows
        missing = [
            digest
            for topic, some in digests.items()
            if topic in neighbour.topics
            for digest in some
            if digest not in knows
        ]
        for digest in missing:
            knows[digest] = None
        for chunk in frames.chunks(missing):
            self._post(neighbour, frames.Have(chunk))

    def _ask(self, neighbour: Neighbour, digests: Iterable[bytes]) -> None:
        """Ask a neighbour for missing announcements that it offers.

        Announcements just requested from a trusted neighbour are postponed: all neighbours offer
        the same ones to a peer that returns. Requests to untrusted neighbours do not postpone any,
        since these may never answer."""
        now = self._world.now()
        trusted = self._slots.trusts(neighbour.peer)
        wanted = []
        for digest in digests:
            if self._store.get(digest) is not None:
                continue
            if self._asked.get(digest, now) > now:
                neighbour.offers[digest] = None
                continue
            wanted.append(digest)
            if trusted:
                self._asked[digest] = now + ANSWER_SECONDS
        for chunk in frames.chunks(wanted):
            self._post(neighbour, frames.Want(chunk))

    async def _tick(self, nursery: trio.Nursery) -> None:
        reported: Counter[str] = Counter()
        report_at = self._world.now() + DROPPED_REPORT_SECONDS
        for tick in itertools.count():
            await trio.sleep(TICK_SECONDS)
            if self._world.now() >= report_at:
                reported = self._report_dropped(reported)
                report_at = self._world.now() + DROPPED_REPORT_SECONDS
            fresh, self._fresh = self._fresh, {}
            self._store.forget_oldest()
            neighbours = list(self._slots.neighbours.values())
            beats = {frames.WORK: [d for some in self._beats for d in some if self._store.get(d)]}
            self._beats.append([])
            for number, neighbour in enumerate(neighbours):
                neighbour.sweep(self._store)
                if fresh:
                    self._offer(neighbour, fresh)
                if (number + tick) % (-(-len(neighbours) // OFFERED)) == 0:
                    self._offer(neighbour, beats)
                if neighbour.offers:
                    offers = list(neighbour.offers)
                    neighbour.offers.clear()
                    self._ask(neighbour, offers)
                neighbour.answer_bytes = ANSWER_BYTES_PER_TICK
                if neighbour.wanted:
                    self._wake(neighbour)
            if self._asked:
                now = self._world.now()
                self._asked = {d: until for d, until in self._asked.items() if until > now}
            self._slots.part_with_strangers()
            if self._slots.open_at <= self._world.now():
                self._open_more(nursery)

    def _report_dropped(self, reported: Counter[str]) -> Counter[str]:
        """Report the envelopes dropped since the counts `reported`; returns the counts now."""
        causes, counts = self._gate.dropped - reported, self._gate.dropped.copy()
        del causes["duplicate"]  # duplicates are usual in gossip
        if causes:
            self._events.emit("gossip.dropped", causes=dict(sorted(causes.items())))
        return counts
