"""Signed, typed, expiring messages, and the gate every one from the network must pass.

Wire: the 64-byte Ed25519 signature, then the *body*, a msgpack array
`[version, kind, run, sender, sequence, issued_ms, expires_ms, payload]`. The signature is over
`"swarm/1/" + kind + 0x00 + body`, the body bytes exactly as sent (design §6), so nothing is ever
re-encoded to be checked. At most 64 KiB in all.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import blake3
import msgspec

from swarm import PROTOCOL_VERSION
from swarm.errors import DECODE_ERRORS, SwarmError
from swarm.identity import SIGNATURE_BYTES, Identity, verify
from swarm.messages import KINDS, Message, PeerRecord, StateMessage, kind_of
from swarm.rates import TokenBuckets
from swarm.world import World

ENVELOPE_BYTES_MAX = 64 * 1024
"""Whole signed envelope. A checkpoint manifest is a blob, so nothing on the wire needs more."""

UNKNOWN_BYTES_MAX = 1024
"""Of an envelope that no field of its body or message explains: room for fields that a later
version appends, and too little to fill anybody's memory with."""

REMEMBERED_BYTES_MAX = 2048
"""A larger envelope is opened anew each time it comes: whatever strangers sign is opened."""

FUTURE_SECONDS_MAX = 3600.0
"""An envelope issued further ahead than this is dropped. Nothing is gained by stamping ahead:
sequences order states, and a sender chooses when they expire. A wrong clock must not end a run."""

TRUSTED_STATE_LATE_SECONDS_MAX = 3600.0
"""How long a trusted peer's newest state counts after it expired: its clock may be slow, and only
the newest of each is ever taken, so there is nothing to replay."""

EVENT_LIFETIME_SECONDS = 120.0
"""Default time to live of an event; also how long its hash is remembered against replay."""

STATE_LIFETIME_SECONDS = 3600.0
"""Checkpoints and step orders outlive a long optimiser step and a trainer's restart."""

SEEN_ENVELOPES_MAX = 100_000
"""Remembered hashes (about 10 MB); a sender's rate limit keeps honest runs far below."""

SENDER_RATE_PER_SECOND = 50.0
"""Envelopes a second accepted from one sender that is not trusted, averaged."""

SENDER_RATE_BURST = 400.0
"""Envelopes such a sender may send at once: a worker's requests after it was cut off."""

SENDERS_REMEMBERED_MAX = 4096
"""Senders that are not trusted whose rate and newest states are remembered (about 2 MB); identities
are free, so that the least recent is forgotten."""

CLOCK_SKEW_SECONDS_MAX = 30.0
"""Clocks that differ by no more agree; by more than this from what counts, a peer says so."""

ENVELOPES_REMEMBERED = 1024
"""Opened envelopes that a process remembers: about 2 MB."""


class Body(msgspec.Struct, array_like=True, frozen=True):
    """The signed part of an envelope, as it is on the wire."""

    version: int
    kind: str
    run: str
    """Run id, or "" for what belongs to no run (a peer record)."""
    sender: str
    sequence: int
    issued_ms: int
    expires_ms: int
    payload: bytes


_body_decoder = msgspec.msgpack.Decoder(Body)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Envelope:
    """An envelope as received or made. `raw` is what travels and is stored; nothing else is."""

    raw: bytes
    body: Body
    message: Message

    @property
    def sender(self) -> str:
        return self.body.sender

    @functools.cached_property
    def digest(self) -> bytes:
        """BLAKE3-256 of the raw bytes: the envelope's name."""
        return blake3.blake3(self.raw).digest()


class Dropped(SwarmError):
    """An envelope was not accepted. `cause` is one of a fixed few words, for counting."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause


SEEN_SWEPT_MIN = 1000
"""Fewer hashes of events than this are not worth looking through for expired ones."""

FORGED = frozenset(
    {
        "bad_signature",
        "malformed",
        "misplaced_kind",
        "not_its_sender",
        "too_large",
        "unknown_kind",
        "wrong_run",
    }
)
"""Causes for which nobody honest sends an envelope, or passes one on."""

INVALID_MAX = 5
"""Forged envelopes until their sender is banned."""

BAN_SECONDS = 60.0
"""How long a peer that sent forged envelopes stays banned."""


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
    """Sign a message. `sequence` comes from `Sequencer`, stored before anything is sent."""
    issued_ms = int(wall_time * 1000)
    body = Body(
        version=PROTOCOL_VERSION,
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
    if body.version != PROTOCOL_VERSION:
        raise Dropped("unknown_version", f"{body.version}, this peer speaks {PROTOCOL_VERSION}")
    message_type = KINDS.get(body.kind)
    if message_type is None:
        raise Dropped("unknown_kind", body.kind[:40])
    if not verify(body.sender, _signed_bytes(body.kind, encoded), raw[:SIGNATURE_BYTES]):
        raise Dropped("bad_signature", body.sender[:64])
    try:
        message = msgspec.msgpack.decode(body.payload, type=message_type)
    except DECODE_ERRORS as error:
        raise Dropped("malformed", f"{body.kind}: {error}") from error
    unknown = max(0, len(encoded) - len(_encoder.encode(body)))
    unknown += max(0, len(body.payload) - len(_encoder.encode(message)))
    if unknown > UNKNOWN_BYTES_MAX:
        raise Dropped("malformed", f"{body.kind}: {unknown} bytes that no field explains")
    return Envelope(raw, body, message)


class _Opened:
    """Opens envelopes and remembers the last `count` of at most `bytes_max`, by their raw bytes:
    gossip and records bring the same envelope many times."""

    def __init__(self, count: int, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._cached = functools.lru_cache(maxsize=count)(_open)

    def open(self, raw: bytes) -> Envelope:
        return _open(raw) if len(raw) > self._bytes_max else self._cached(raw)


_opened = ContextVar(
    "_opened",
    default=_Opened(ENVELOPES_REMEMBERED, REMEMBERED_BYTES_MAX),  # noqa: B039
)
"""Shared by all that one process opens: what a signature proves does not depend on who asks."""


@contextmanager
def remembering_envelopes(count: int) -> Iterator[None]:
    """Inside, remember the last `count` opened envelopes, however large: for a process that is
    many peers at once, each of which would check the same signatures."""
    token = _opened.set(_Opened(count, ENVELOPE_BYTES_MAX))
    try:
        yield
    finally:
        _opened.reset(token)


def open_envelope(raw: bytes) -> Envelope:
    """Decode and check the signature; nothing about time, run or permission. Raises `Dropped`."""
    if len(raw) > ENVELOPE_BYTES_MAX:
        raise Dropped("too_large", f"{len(raw)} bytes")
    return _opened.get().open(bytes(raw))


class SequenceStore(Protocol):
    """Where the last sequence number survives a restart."""

    def load(self) -> int: ...

    async def save(self, value: int) -> None: ...


class Sequencer:
    """Sequence numbers that only grow, over restarts and clock steps (design §6).

    The next is max(stored + 1, wall milliseconds); a reserve ahead of it is stored before use, so
    that the disk is asked once in a thousand numbers.
    """

    RESERVE = 10_000

    def __init__(self, store: SequenceStore, wall_time: Callable[[], float]) -> None:
        self._store = store
        self._wall_time = wall_time
        self._last = store.load()
        self._reserved = self._last
        self.signed_until = (self._last - self.RESERVE) / 1000
        """By its clock then, this peer signed something at this wall time in an earlier life."""

    async def next(self) -> int:
        """The next number; durable before it is returned."""
        self._last = max(self._last + 1, int(self._wall_time() * 1000))
        if self._last > self._reserved:
            self._reserved = self._last + self.RESERVE
            await self._store.save(self._reserved)
        return self._last


class _Newest(NamedTuple):
    """What is remembered of a sender's newest state: never its bytes, which a stranger may pad."""

    order: tuple[int, ...]
    digest: bytes


class Gate:
    """Decides which envelopes of one run are believed; counts the dropped by cause.

    *State* kinds are monotone per sender and kind; *event* kinds are accepted once, in any order,
    until they expire. `permits(sender, kind)` says whether that peer may send that kind at all
    (and is where evicted peers are stopped); it returns a cause or None. Those that it `trusts`
    are not held to a rate: what they signed reaches a peer that was away all at once, through
    anybody, and each of it counts once. Nor do their clocks decide: a state of theirs counts by its
    sequence long after it expired, an event as much later as their clock is known to be off
    (`clock_off`, in seconds).
    """

    def __init__(
        self,
        world: World,
        run: str,
        permits: Callable[[str, Message], str | None],
        trusts: Callable[[str], bool],
        clock_off: Callable[[str], float] = lambda _sender: 0.0,
    ) -> None:
        self._world = world
        self._run = run
        self._permits = permits
        self.trusts = trusts
        self._clock_off = clock_off
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        """Events, and when each expires; a state is known by its order."""
        self._sweep_at = SEEN_SWEPT_MIN
        """How many of them there are when the expired are looked for next."""
        self._states: dict[tuple[str, str], _Newest] = {}
        """Of those that it trusts."""
        self._others_states: OrderedDict[tuple[str, str], _Newest] = OrderedDict()
        """Of everybody else, who may be invented: the last that were heard of."""
        self._rates = TokenBuckets(
            SENDER_RATE_PER_SECOND,
            SENDER_RATE_BURST,
            SENDERS_REMEMBERED_MAX,
        )
        self.dropped: Counter[str] = Counter()

    def admit(self, raw: bytes, kinds: Container[type[Message]] | None = None) -> Envelope:
        """Check one envelope and remember it, if it is of one of `kinds`; raises `Dropped` (also
        for a plain duplicate)."""
        try:
            return self._admit(raw, kinds)
        except Dropped as dropped:
            self.dropped[dropped.cause] += 1
            raise

    def _admit(self, raw: bytes, kinds: Container[type[Message]] | None) -> Envelope:
        envelope = open_envelope(raw)
        body = envelope.body
        if kinds is not None and type(envelope.message) not in kinds:
            raise Dropped("misplaced_kind", body.kind)
        if body.run != ("" if isinstance(envelope.message, PeerRecord) else self._run):
            raise Dropped("wrong_run", body.run[:100])
        wall_ms = int(self._world.wall_time() * 1000)
        late_ms = self._late_ms(envelope)
        if body.expires_ms + late_ms <= wall_ms:
            raise Dropped("expired", f"{wall_ms - body.expires_ms} ms ago")
        if body.issued_ms > wall_ms + FUTURE_SECONDS_MAX * 1000:
            raise Dropped("from_the_future", f"{body.issued_ms - wall_ms} ms ahead")
        if envelope.digest in self._seen:
            raise Dropped("duplicate")
        cause = self._permits(body.sender, envelope.message)
        if cause is not None:
            raise Dropped(cause, f"{body.kind} from {body.sender}")
        if isinstance(envelope.message, StateMessage):
            key = (body.sender, body.kind)
            newest = _Newest((*envelope.message.order(), body.sequence), envelope.digest)
            held = self._newest(key)
            if held is not None and newest.order <= held.order:
                raise Dropped("duplicate" if held.digest == newest.digest else "old_state")
        if not self.trusts(body.sender) and not self._within_rate(body.sender):
            raise Dropped("over_rate", body.sender)
        if isinstance(envelope.message, StateMessage):
            self._keep_newest(key, newest)
        else:
            self._remember(envelope.digest, body.expires_ms + late_ms, wall_ms)
        return envelope

    def _late_ms(self, envelope: Envelope) -> int:
        """How long after it expired an envelope still counts."""
        if not self.trusts(envelope.sender):
            return 0
        if isinstance(envelope.message, StateMessage):
            return int(TRUSTED_STATE_LATE_SECONDS_MAX * 1000)
        return int(self._clock_off(envelope.sender) * 1000)

    def _within_rate(self, sender: str) -> bool:
        return self._rates.of(sender).take(1, self._world.now())

    def _remember(self, digest: bytes, expires_ms: int, wall_ms: int) -> None:
        self._seen[digest] = expires_ms
        if len(self._seen) > self._sweep_at:
            self._seen = OrderedDict(
                (seen, until) for seen, until in self._seen.items() if until > wall_ms
            )
            self._sweep_at = max(SEEN_SWEPT_MIN, 2 * len(self._seen))
        if len(self._seen) > SEEN_ENVELOPES_MAX:
            self._seen.popitem(last=False)

    def _keep_newest(self, key: tuple[str, str], newest: _Newest) -> None:
        if self.trusts(key[0]):
            self._states[key] = newest
            return
        self._others_states[key] = newest
        self._others_states.move_to_end(key)
        if len(self._others_states) > SENDERS_REMEMBERED_MAX:
            self._others_states.popitem(last=False)

    def _newest(self, key: tuple[str, str]) -> _Newest | None:
        return self._states.get(key) or self._others_states.get(key)

    def newest(self, sender: str, kind: str) -> bytes | None:
        """Digest of the newest state of one sender and kind that is remembered."""
        held = self._newest((sender, kind))
        return held.digest if held is not None else None
