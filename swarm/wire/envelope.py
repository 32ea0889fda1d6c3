"""Signed, typed, expiring messages, and the gate that checks all of them.

On the wire an envelope is a 64-byte Ed25519 signature and then the *body*, a msgpack array
`[version, kind, run, sender, sequence, issued_ms, expires_ms, payload]`. The signature is over
`"swarm/1/" + kind + 0x00 + body`, with the body bytes exactly as sent, so that a check re-encodes
nothing. An envelope has at most 64 KiB."""

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar

import blake3
import msgspec
from msgspec import Meta

from swarm.errors import DECODE_ERRORS, SwarmError
from swarm.transport.rates import TokenBuckets
from swarm.wire.identity import SIGNATURE_BYTES, Identity, verify
from swarm.wire.kinds import KINDS, kind_of
from swarm.wire.manifest import NEEDS_INDEX, RunManifest
from swarm.wire.messages import Count, Message, PeerRecord, StateMessage
from swarm.wire.protocol import PROTOCOL_VERSION, ProtocolVersion
from swarm.world import Database, World, execute
from swarm.world.recent import Recent

ENVELOPE_VERSION = 1
"""Version of the envelope itself, which has never changed. Envelopes of another are dropped."""

ENVELOPE_BYTES_MAX = 64 * 1024
"""Size of a whole signed envelope. Checkpoint manifests are blobs, so no message needs more."""

UNKNOWN_BYTES_MAX = 1024
"""Bytes of an envelope that belong to no known field of its body or message. They leave room for
fields that a later version appends, and are too few to fill a peer's memory. A field that may be
longer needs a new protocol version."""

REMEMBERED_BYTES_MAX = 2048
"""Largest envelope that is cached once opened. Strangers can sign large ones, so these are opened
again each time they arrive."""

FUTURE_SECONDS_MAX = 3600.0
"""An envelope issued further in the future than this is dropped. The bound is wide, because a wrong
clock must not end a run and a sender gains nothing by a late stamp: sequence numbers order states,
and the sender chooses when they expire anyway."""

TRUSTED_STATE_LATE_SECONDS_MAX = 3600.0
"""Time for which a trusted peer's newest state counts after its expiry, since that peer's clock may
be slow. Only the newest state of each kind is accepted, so an old one cannot be replayed."""

EVENT_LIFETIME_SECONDS = 120.0
"""Default time to live of an event; its hash is remembered as long, against replay."""

STATE_LIFETIME_SECONDS = 3600.0
"""Time to live of checkpoints and step orders. They outlive a long step and a restart."""

SEEN_ENVELOPES_MAX = 100_000
"""Number of remembered event hashes (about 10 MB). Rate limits keep an honest run far below."""

SENDER_RATE_PER_SECOND = 50.0
"""Average number of envelopes per second accepted from an untrusted sender."""

SENDER_RATE_BURST = 400.0
"""Number of envelopes that such a sender may send at once, such as a worker's after an
interruption."""

TRUSTED_RATE_PER_SECOND = 200.0
"""Average number of envelopes per second accepted from a trusted sender: the acknowledgements and
verdicts of a validator that judges 100 submissions a second."""

TRUSTED_RATE_BURST = 20_000.0
"""Number of envelopes of a trusted sender accepted at once. A peer that was away, or a validator
that returns, receives all that has not expired at once."""

SENDERS_REMEMBERED_MAX = 4096
"""Number of untrusted senders whose rates and newest states are remembered (about 2 MB). Identities
are free, so the least recent sender is forgotten."""

CLOCK_SKEW_SECONDS_MAX = 30.0
"""Clocks that differ by at most this agree. A peer reports a larger difference."""

ENVELOPES_REMEMBERED = 1024
"""Number of opened envelopes that a process caches (about 2 MB)."""


MessageT = TypeVar("MessageT", bound=Message)


Moment = Annotated[int, Meta(ge=0, le=253_402_300_799_000)]
"""Milliseconds since 1970, up to the end of the year 9999, the last that a calendar can print."""


class Body(msgspec.Struct, array_like=True, frozen=True):
    """The signed part of an envelope, in wire order."""

    version: int
    kind: str
    run: str
    """Run id; empty for a peer record, which belongs to no run."""
    sender: str
    sequence: Count
    issued_ms: Moment
    expires_ms: Moment
    payload: bytes


_body_decoder = msgspec.msgpack.Decoder(Body)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Envelope:
    """A received or newly signed envelope. Only `raw` is sent and stored."""

    raw: bytes
    body: Body
    message: Message

    @property
    def sender(self) -> str:
        return self.body.sender

    def expect(self, message_type: type[MessageT]) -> MessageT:
        """Return the message, which the caller knows to be of this type."""
        assert isinstance(self.message, message_type)
        return self.message

    @functools.cached_property
    def digest(self) -> bytes:
        """BLAKE3-256 of the raw bytes, which identifies the envelope."""
        return blake3.blake3(self.raw).digest()


class Dropped(SwarmError):
    """An envelope was not accepted. `cause` is one word of a small fixed set, for counting."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause


class NeedsNewer(Dropped):
    """A run manifest needs a newer protocol version than this one. Its signature is correct, but
    whether `sender` owns the run is not known: only a reader of all its fields can tell."""

    def __init__(self, body: Body, version: int, needs: int) -> None:
        super().__init__("needs_newer", f"{body.run} needs protocol version {needs}")
        self.sender = body.sender
        self.run = body.run
        self.version = version
        """Version of the run's manifest."""
        self.needs = needs


SEEN_SWEPT_MIN = 1000
"""Smallest number of remembered event hashes at which expired ones are removed."""

FORGED = frozenset(
    {"bad_signature", "malformed", "misplaced_kind", "not_its_sender", "too_large", "wrong_run"}
)
"""Causes of drops that an honest peer of any version never gives, neither as the sender nor by
forwarding. A newer peer may send kinds of messages that this one does not know."""

INVALID_MAX = 5
"""Number of forged envelopes after which their sender is banned."""

BAN_SECONDS = 60.0
"""Duration of the ban of a peer that sent forged envelopes."""


def _signed_bytes(kind: str, body: bytes) -> bytes:
    return b"swarm/1/" + kind.encode("utf-8") + b"\x00" + body


def seal(
    identity: Identity,
    message: Message,
    *,
    run: str,
    sequence: int,
    wall_time: float,
    lifetime_seconds: float,
) -> Envelope:
    """Sign a message. `sequence` comes from `Sequencer`, which has stored it."""
    issued_ms = int(wall_time * 1000)
    body = Body(
        version=ENVELOPE_VERSION,
        kind=kind_of(message),
        run=run,
        sender=identity.peer_id,
        sequence=sequence,
        issued_ms=issued_ms,
        expires_ms=issued_ms + int(lifetime_seconds * 1000),
        payload=_encoder.encode(message),
    )
    encoded = _encoder.encode(body)
    raw = identity.sign(_signed_bytes(body.kind, encoded)) + encoded
    if len(raw) > ENVELOPE_BYTES_MAX:
        raise ValueError(f"a {body.kind} of {len(raw)} bytes does not fit an envelope")
    return Envelope(raw, body, message)


def _open(raw: bytes) -> Envelope:
    encoded = raw[SIGNATURE_BYTES:]
    try:
        body = _body_decoder.decode(encoded)
    except DECODE_ERRORS as error:
        raise Dropped("malformed", str(error)) from error
    if body.version != ENVELOPE_VERSION:
        raise Dropped("unknown_version", f"{body.version}, this peer reads {ENVELOPE_VERSION}")
    if not verify(body.sender, _signed_bytes(body.kind, encoded), raw[:SIGNATURE_BYTES]):
        raise Dropped("bad_signature", body.sender[:64])
    message_type = KINDS.get(body.kind)
    if message_type is None:
        raise Dropped("unknown_kind", body.kind[:40])
    try:
        if message_type is RunManifest:
            _check_needs(body)
        message = msgspec.msgpack.decode(body.payload, type=message_type)
    except DECODE_ERRORS as error:
        raise Dropped("malformed", f"{body.kind}: {error}") from error
    unknown = max(0, len(encoded) - len(_encoder.encode(body)))
    unknown += max(0, len(body.payload) - len(_encoder.encode(message)))
    if unknown > UNKNOWN_BYTES_MAX:
        raise Dropped("malformed", f"{body.kind}: {unknown} bytes that no field explains")
    return Envelope(raw, body, message)


def _check_needs(body: Body) -> None:
    """Raise `NeedsNewer` for a run manifest of a newer protocol version, before its fields are
    decoded: these may have values that this version does not know."""
    fields = msgspec.msgpack.decode(body.payload, type=list[msgspec.Raw])
    if len(fields) <= NEEDS_INDEX:
        return
    needs = msgspec.msgpack.decode(fields[NEEDS_INDEX], type=ProtocolVersion)
    if needs <= PROTOCOL_VERSION:
        return
    # Whether the signer owns the run is for the caller to say: successors do not sign its id.
    raise NeedsNewer(body, msgspec.msgpack.decode(fields[1], type=Count), needs)


class _Opened:
    """Opens envelopes and caches the last `count` of at most `bytes_max` bytes, by raw bytes.

    Gossip and records deliver the same envelope many times."""

    def __init__(self, count: int, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._cached = functools.lru_cache(maxsize=count)(_open)

    def open(self, raw: bytes) -> Envelope:
        return _open(raw) if len(raw) > self._bytes_max else self._cached(raw)


_opened = ContextVar(
    "_opened",
    default=_Opened(ENVELOPES_REMEMBERED, REMEMBERED_BYTES_MAX),  # noqa: B039
)
"""Cache of opened envelopes, shared by the whole process. All callers may share it, since whether a
signature is valid does not depend on the caller."""


@contextmanager
def remembering_envelopes(count: int) -> Iterator[None]:
    """Cache the last `count` opened envelopes of any size inside the block.

    For a process that simulates many peers, each of which would check the same signatures."""
    token = _opened.set(_Opened(count, ENVELOPE_BYTES_MAX))
    try:
        yield
    finally:
        _opened.reset(token)


def open_envelope(raw: bytes) -> Envelope:
    """Decode an envelope and check its signature, but not its time, run or permission.

    Raises `Dropped`."""
    if len(raw) > ENVELOPE_BYTES_MAX:
        raise Dropped("too_large", f"{len(raw)} bytes")
    return _opened.get().open(bytes(raw))


def readable(raws: Iterable[bytes]) -> Iterator[Envelope]:
    """The envelopes among these that `open_envelope` opens."""
    for raw in raws:
        with suppress(Dropped):
            yield open_envelope(raw)


class Sequencer:
    """Makes sequence numbers that always increase, across restarts and clock steps.

    The next number is max(last + 1, wall milliseconds). A bound `RESERVE` above it is stored before
    use, so that not every number needs a write to disk."""

    RESERVE = 10_000

    TABLE = "CREATE TABLE IF NOT EXISTS sequence (id INTEGER PRIMARY KEY, value INTEGER NOT NULL)"

    def __init__(self, database: Database, wall_time: Callable[[], float]) -> None:
        """`database` has `TABLE`."""
        self._database = database
        self._wall_time = wall_time
        rows = database.read("SELECT value FROM sequence WHERE id = 0 ORDER BY id")
        self._last = int(rows[0][0]) if rows else 0
        self._reserved = self._last

    async def next(self) -> int:
        """Return the next number, covered by a durable bound."""
        self._last = max(self._last + 1, int(self._wall_time() * 1000))
        if self._last > self._reserved:
            self._reserved = self._last + self.RESERVE
            sql = "INSERT OR REPLACE INTO sequence (id, value) VALUES (0, ?)"
            await execute(self._database, (sql, (self._reserved,)))
        return self._last


class _Newest(NamedTuple):
    """Order and digest of a newest state. Its bytes are not kept, since a stranger may pad them."""

    order: tuple[int, ...]
    digest: bytes


@dataclass(eq=False)
class Gate:
    """Decides which envelopes of one run are accepted, and counts the dropped ones by cause.

    *State* kinds must increase in order, per sender and kind. *Event* kinds are accepted once, in
    any order, until they expire. `permits(sender, message)` returns why a sender may not send a
    message, or None; it also stops evicted peers.

    Senders for which `trusts` is true have a rate of their own, far above any honest need, and
    `flooded` is called with the sender of each envelope above it. Their clocks do not decide
    either. Their states count by sequence long after they expire. Their events expire later
    by the known difference of their clock (`clock_off`, in seconds).

    `outgrown` is called with each run manifest that needs a newer protocol version, of any run."""

    world: World
    run: str
    permits: Callable[[str, Message], str | None]
    trusts: Callable[[str], bool]
    clock_off: Callable[[str], float] = lambda _sender: 0.0
    flooded: Callable[[str], None] = lambda _sender: None
    outgrown: Callable[[NeedsNewer], None] = lambda _manifest: None

    def __post_init__(self) -> None:
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        """Digests of events and their expiry in milliseconds. States are recognised by order."""
        self._sweep_at = SEEN_SWEPT_MIN
        """Number of remembered events at which expired ones are next removed."""
        self._states: dict[tuple[str, str], _Newest] = {}
        """Newest states of trusted senders, by sender and kind."""
        self._others_states: Recent[tuple[str, str], _Newest] = Recent(SENDERS_REMEMBERED_MAX)
        """Newest states of other senders, which may be invented; only the most recent are kept."""
        self._rates = TokenBuckets(
            SENDER_RATE_PER_SECOND, SENDER_RATE_BURST, SENDERS_REMEMBERED_MAX
        )
        self._trusted_rates = TokenBuckets(
            TRUSTED_RATE_PER_SECOND, TRUSTED_RATE_BURST, SENDERS_REMEMBERED_MAX
        )
        self.dropped: Counter[str] = Counter()

    def admit(self, raw: bytes, kinds: Container[type[Message]] | None = None) -> Envelope:
        """Check one envelope and remember it.

        Raises `Dropped` for an invalid envelope, a duplicate, or a kind that is not in `kinds`."""
        try:
            return self._admit(raw, kinds)
        except Dropped as dropped:
            self.dropped[dropped.cause] += 1
            if isinstance(dropped, NeedsNewer):
                self.outgrown(dropped)
            raise

    def _admit(self, raw: bytes, kinds: Container[type[Message]] | None) -> Envelope:
        envelope = open_envelope(raw)
        body = envelope.body
        if kinds is not None and type(envelope.message) not in kinds:
            raise Dropped("misplaced_kind", body.kind)
        if body.run != ("" if isinstance(envelope.message, PeerRecord) else self.run):
            raise Dropped("wrong_run", body.run[:100])
        wall_ms = int(self.world.wall_time() * 1000)
        late_ms = self._late_ms(envelope)
        if body.expires_ms + late_ms <= wall_ms:
            raise Dropped("expired", f"{wall_ms - body.expires_ms} ms ago")
        if body.issued_ms > wall_ms + FUTURE_SECONDS_MAX * 1000:
            raise Dropped("from_the_future", f"{body.issued_ms - wall_ms} ms ahead")
        # Before the rights and the rate: most of what gossip brings are copies. They must not use
        # up their signer's rate, or any neighbour could silence it by repeating what it said.
        if envelope.digest in self._seen:
            raise Dropped("duplicate")
        cause = self.permits(body.sender, envelope.message)
        if cause is not None:
            raise Dropped(cause, f"{body.kind} from {body.sender}")
        if isinstance(envelope.message, StateMessage):
            key = (body.sender, body.kind)
            newest = _Newest((*envelope.message.order(), body.sequence), envelope.digest)
            held = self._newest(key)
            if held is not None and newest.order <= held.order:
                raise Dropped("duplicate" if held.digest == newest.digest else "old_state")
        trusted = self.trusts(body.sender)
        rates = self._trusted_rates if trusted else self._rates
        if not rates.of(body.sender).take(1, self.world.now()):
            if trusted:
                self.flooded(body.sender)
            raise Dropped("over_rate", body.sender)
        # Only what was let through is remembered: what is over the rate may come again.
        if isinstance(envelope.message, StateMessage):
            (self._states if trusted else self._others_states)[key] = newest
        else:
            self._remember(envelope.digest, body.expires_ms + late_ms, wall_ms)
        return envelope

    def _late_ms(self, envelope: Envelope) -> int:
        """Return the milliseconds for which an envelope still counts after its expiry."""
        if not self.trusts(envelope.sender):
            return 0
        if isinstance(envelope.message, StateMessage):
            return int(TRUSTED_STATE_LATE_SECONDS_MAX * 1000)
        return int(self.clock_off(envelope.sender) * 1000)

    def _remember(self, digest: bytes, expires_ms: int, wall_ms: int) -> None:
        self._seen[digest] = expires_ms
        if len(self._seen) > self._sweep_at:
            self._seen = OrderedDict(
                (seen, until) for seen, until in self._seen.items() if until > wall_ms
            )
            self._sweep_at = max(SEEN_SWEPT_MIN, 2 * len(self._seen))
        if len(self._seen) > SEEN_ENVELOPES_MAX:
            self._seen.popitem(last=False)

    def _newest(self, key: tuple[str, str]) -> _Newest | None:
        return self._states.get(key) or self._others_states.get(key)

    def newest(self, sender: str, kind: str) -> bytes | None:
        """Return the digest of the newest remembered state of one sender and kind."""
        held = self._newest((sender, kind))
        return held.digest if held is not None else None
