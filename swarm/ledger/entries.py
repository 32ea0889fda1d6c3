"""The entries of a trusted peer's log: msgpack arrays `[tag, fields…]` (docs/protocol.md)."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Meta

from swarm.errors import DECODE_ERRORS
from swarm.wire import messages
from swarm.wire.envelope import ENVELOPE_BYTES_MAX

Outcome = Literal["consumed", "zero-advantage", "stale", "carried", "unreadable"]
"""The outcome of an accepted group; it does not change the credit. Stale: its policy was too old,
its worker was evicted, another validator's refusal overruled its acceptance, or another file was
taken (and credited) under its number. Unreadable: the trainer could not read its file again."""

_Raw = Annotated[bytes, Meta(max_length=ENVELOPE_BYTES_MAX)]

ENTRY_BYTES_MAX = ENVELOPE_BYTES_MAX + 4096
"""The largest entries: an eviction with its envelope, and the outcomes of 4,096 groups."""


class _Struct(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Fields are encoded in order; new fields go last, with a default."""


class Judged(_Struct, frozen=True, kw_only=True, tag="judged"):
    """A verdict. Its envelope, the worker's receipt, is stored next to the log."""

    submission: messages.Digest
    worker: messages.Key
    lineage: messages.Count
    step: messages.Count
    policy: messages.Count
    number: messages.Count
    outcome: Literal["accepted", "refused", "quarantined"]
    failed: Annotated[str, Meta(max_length=40)] = ""
    proven_fault: bool = False
    groups: messages.Count = 0
    samples: messages.Count = 0
    rewards_digest: messages.Digest
    size_bytes: messages.Count
    rollouts_digest: Annotated[bytes, Meta(max_length=32)] = b""
    evidence: messages.Evidence = messages.Evidence()
    tokens: messages.Count = 0
    share: messages.Share = 1.0

    @property
    def recomputed(self) -> int:
        """Tokens that were recomputed with the policy; 0 if the content was not checked."""
        return self.evidence.tokens


class Redeemed(_Struct, frozen=True, kw_only=True, tag="redeemed"):
    """A peer redeemed the owner's invite. Of several entries for one invite the earliest counts."""

    invite: messages.InviteId
    peer: messages.Key
    redeemed_ms: messages.Count
    envelope: _Raw = b""


class Evicted(_Struct, frozen=True, kw_only=True, tag="evicted"):
    """This trusted peer evicted a peer from the run."""

    peer: messages.Key
    reason: messages.Line
    submission: Annotated[bytes, Meta(max_length=32)] = b""
    envelope: _Raw


class Reinstated(_Struct, frozen=True, kw_only=True, tag="reinstated"):
    """The owner reinstated a peer, and this trusted peer received the message."""

    peer: messages.Key
    reason: messages.Line = ""
    envelope: _Raw


class TrainingFigures(_Struct, frozen=True, kw_only=True):
    """What a trainer says about the step that made a policy; for display, no rule rests on it.

    None: not measured, or not finite.
    """

    reward: messages.Finite | None = None
    length: messages.Finite | None = None
    entropy: messages.Finite | None = None
    kl: messages.Finite | None = None
    kl_reference: messages.Finite | None = None
    clipped: messages.Finite | None = None
    gradient_norm: messages.Finite | None = None
    learning_rate: messages.Finite | None = None
    loss: messages.Finite | None = None
    seconds: messages.Finite | None = None
    repetition: messages.Finite | None = None
    truncated: messages.Finite | None = None
    of_each: Annotated[
        list[list[messages.Finite | None]], Meta(max_length=messages.ENVIRONMENTS_MAX)
    ] = []


class RoundFigures(_Struct, frozen=True, kw_only=True):
    """What one of several trainers says of a round that it has contributed to, and of the outer
    state that its inner steps began from; for display, no rule rests on it."""

    loss: messages.Finite | None = None
    validation_loss: messages.Finite | None = None
    tokens_merged: messages.Count = 0
    trainers_present: messages.Count = 0
    trainers_merged: messages.Count = 0
    bytes_sent: messages.Count = 0
    bytes_received: messages.Count = 0
    utilisation: messages.Finite | None = None
    rounds_lost: messages.Count = 0
    tokens_lost: messages.Count = 0


class CheckpointPublished(_Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """A trainer published policy `step`, or one of several trainers a contribution."""

    lineage: messages.Count
    step: messages.Count
    manifest: messages.Digest
    figures: TrainingFigures | None = None
    round: RoundFigures | None = None


class Consumed(_Struct, frozen=True, kw_only=True, tag="consumed"):
    """The outcome of each group of an accepted submission at `step`."""

    step: messages.Count
    submission: messages.Digest
    outcomes: Annotated[list[Outcome], Meta(max_length=4096)]


class Carried(_Struct, frozen=True, kw_only=True, tag="carried"):
    """An entry of a sealed epoch that stays in force: admissions, invites, expulsions."""

    position: messages.Count
    entry: _Raw


class SealedCapital(_Struct, frozen=True, kw_only=True):
    """The capital of one process's bets against a worker (`swarm.ledger.capital`)."""

    submissions: messages.Count
    entered: messages.Bets


class SealedWorker(_Struct, frozen=True, kw_only=True, tag="sealed_worker"):
    """One worker's final record at a seal, over the whole run."""

    worker: messages.Key
    accepted: messages.Count = 0
    refused: messages.Count = 0
    quarantined: messages.Count = 0
    groups: messages.Count = 0
    samples: messages.Count = 0
    verified: messages.Count = 0
    final: messages.Count = 0
    void: messages.Count = 0
    capitals: Annotated[list[SealedCapital], Meta(max_length=4)] = []


class SealedLog(_Struct, frozen=True, kw_only=True):
    """How much of one log a seal covers."""

    owner: messages.Key
    size: messages.Count
    root: messages.Digest
    first: messages.Count


class Sealed(_Struct, frozen=True, kw_only=True, tag="sealed"):
    """Seals an epoch. The `block` entries before it carry what the next epochs need of it."""

    epoch: messages.Count
    lineage: messages.Count
    step: messages.Count
    logs: Annotated[list[SealedLog], Meta(max_length=256)]
    rules: messages.Digest
    totals: messages.Digest
    block: messages.Count

    def log(self, owner: str) -> SealedLog | None:
        """How much of one log is covered."""
        return next((log for log in self.logs if log.owner == owner), None)


Entry: TypeAlias = (
    Redeemed
    | Judged
    | Evicted
    | Reinstated
    | CheckpointPublished
    | Consumed
    | Carried
    | SealedWorker
    | Sealed
)

LASTING = (Redeemed, Evicted, Reinstated)
"""Entries that stay in force beyond their epoch. A seal carries no others."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    """Encode an entry as the bytes of a leaf; raises `ValueError` when it exceeds its bound."""
    raw = _encoder.encode(entry)
    if len(raw) > ENTRY_BYTES_MAX:
        raise ValueError(f"a log entry of {len(raw)} bytes; at most {ENTRY_BYTES_MAX} are allowed")
    return raw


def decode(raw: bytes) -> Entry:
    """Decode an entry; raises `ValueError` when it is malformed."""
    if len(raw) > ENTRY_BYTES_MAX:
        raise ValueError(f"a log entry of {len(raw)} bytes; at most {ENTRY_BYTES_MAX} are allowed")
    try:
        entry = _decoder.decode(raw)
        carried = _decoder.decode(entry.entry) if isinstance(entry, Carried) else None
    except DECODE_ERRORS as error:
        raise ValueError(f"a malformed log entry: {error}") from error
    if carried is not None and not isinstance(carried, LASTING):
        raise ValueError("a malformed log entry: what it carries on does not stay in force")
    return entry


def unfolded(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Entries, with those that a seal carries on in place of `Carried`."""
    for entry in entries:
        yield decode(entry.entry) if isinstance(entry, Carried) else entry


def expulsions_in(entries: Iterable[Entry]) -> Iterator[bytes]:
    """The signed evictions and reinstatements in entries, also those that a seal carries on."""
    for entry in unfolded(entries):
        if isinstance(entry, (Evicted, Reinstated)):
            yield entry.envelope


def rewards_digest(rewards: messages.Rewards) -> bytes:
    """BLAKE3-256 of the msgpack of rewards [groups][group size]."""
    return blake3(_encoder.encode(rewards)).digest()


def judged(verdict: messages.Verdict) -> Judged:
    """The log entry of a verdict."""
    same = (name for name in Judged.__struct_fields__ if name in verdict.__struct_fields__)
    return Judged(
        **{name: getattr(verdict, name) for name in same},
        groups=len(verdict.rewards),
        samples=sum(len(group) for group in verdict.rewards),
        rewards_digest=rewards_digest(verdict.rewards),
    )
