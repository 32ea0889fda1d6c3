"""Messages of several trainers: their contributions, their states, and the records of rounds.

A *round record* names its parent, so records form chains, and the outer state after a record is a
function of its chain alone (`swarm.wire.manifest.Outer`). A record is named by the digest of its
envelope. docs/protocol.md explains every field."""

from typing import Annotated, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from swarm.wire.identity import SIGNATURE_BYTES, Identity, verify
from swarm.wire.manifest import SHARDS_MAX, STRANGERS_MAX, TRAINERS_MAX
from swarm.wire.messages import CheckpointReference, Count, Digest, Key, Message, StateMessage

GENESIS = bytes(32)
"""Names the state before the first round, in place of a record."""

Stage = Literal["joining", "waiting", "training"]

CONTRIBUTION_TOKENS_MAX = 1 << 44
"""Most tokens of one contribution, 17 million million, so that no sum of a run overflows."""


class _Signed(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Signed by the trainer that it names, over all its other fields and the run's id."""

    purpose: ClassVar[bytes]
    trainer: Key

    def signed(self, identity: Identity, run: str) -> Self:
        """The same with its trainer's signature."""
        return msgspec.structs.replace(self, signature=identity.sign(self._signed_bytes(run)))

    def is_signed(self, run: str) -> bool:
        """Whether the trainer that it names has signed it for this run."""
        signature: bytes = msgspec.structs.asdict(self)["signature"]
        return verify(self.trainer, self._signed_bytes(run), signature)

    def _signed_bytes(self, run: str) -> bytes:
        unsigned = msgspec.structs.replace(self, signature=b"")
        return b"swarm/1/" + self.purpose + b"\x00" + msgspec.msgpack.encode((run, unsigned))


class Contribution(_Signed, array_like=True, frozen=True, kw_only=True):
    """A trainer's pseudo-gradient of one round, published like a checkpoint.

    It is signed, so a record's signer can neither make up another's contribution nor change one."""

    purpose = b"contribution"
    base: Digest
    base_round: Count
    artifact: CheckpointReference
    total_bytes: Count
    tokens: Annotated[int, Meta(ge=1, le=CONTRIBUTION_TOKENS_MAX)]
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""


Shard = Annotated[int, Meta(ge=0, lt=SHARDS_MAX)]


class MergedShard(_Signed, array_like=True, frozen=True, kw_only=True):
    """The mean of one shard of a record's contributions, which a trainer has made and publishes.

    It follows from the record alone, so anyone can prove a wrong one by this signature."""

    purpose = b"merged-shard"
    record: Digest
    shard: Shard
    artifact: CheckpointReference
    total_bytes: Count
    values: Digest
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""


class HeldShards(msgspec.Struct, array_like=True, frozen=True):
    """Shards of a contribution that a trainer has fetched and checked."""

    contribution: Digest
    shards: Annotated[list[Shard], Meta(max_length=SHARDS_MAX)]


MERGED_MAX = 2 * SHARDS_MAX
"""Merged shards in a status, which has to fit in an envelope: about 270 bytes each."""

DISPUTED_MAX = 4


SCORE_MAX = 3000
"""Largest score, in thousandths of a standard error."""

RATED_MAX = 128
"""Strangers whose ratings a record keeps."""

Score = Annotated[int, Meta(ge=-SCORE_MAX, le=SCORE_MAX)]


class Rated(msgspec.Struct, array_like=True, frozen=True):
    """What the signer of a record measured of a stranger, and what follows from all records."""

    trainer: Key
    gain: Score = 0
    own: Score = 0
    gain_rating: Score = 0
    own_rating: Score = 0

    @property
    def is_scored(self) -> bool:
        """Whether it contributed to this round."""
        return bool(self.gain or self.own)


class Measured(msgspec.Struct, array_like=True, frozen=True):
    """What a trainer measured of a stranger's contribution; `Rated` explains the scores."""

    trainer: Key
    artifact: Digest
    gain: Score = 0
    own: Score = 0


class Offer(Message, frozen=True, kw_only=True):
    """A stranger's contribution, as it announces it to a trainer of a scored run."""

    contribution: Contribution


class OuterStatus(StateMessage, frozen=True, kw_only=True):
    """A trainer's present position: its newest outer state, and its newest contribution.

    It is also the trainer's heartbeat for the other trainers."""

    round: Count
    record: Digest
    tokens: Count
    state: Digest
    published: CheckpointReference | None = None
    contribution: Contribution | None = None
    leaving: bool = False
    stage: Stage = "training"
    held: Annotated[list[HeldShards], Meta(max_length=2 * TRAINERS_MAX)] = msgspec.field(
        default_factory=list
    )
    merged: Annotated[list[MergedShard], Meta(max_length=MERGED_MAX)] = msgspec.field(
        default_factory=list
    )
    disputed: Annotated[list[MergedShard], Meta(max_length=DISPUTED_MAX)] = msgspec.field(
        default_factory=list
    )
    measured: Annotated[list[Measured], Meta(max_length=STRANGERS_MAX)] = msgspec.field(
        default_factory=list
    )
    measured_from: Digest | None = None


class RoundRecord(Message, frozen=True, kw_only=True):
    """Closes a round: names the contributions whose merge leads to the next outer state."""

    round: Annotated[int, Meta(ge=1, le=2**53)]
    parent: Digest
    state: Digest
    contributions: Annotated[
        list[Contribution], Meta(min_length=1, max_length=TRAINERS_MAX + STRANGERS_MAX)
    ]
    tokens: Count
    rated: Annotated[list[Rated], Meta(max_length=RATED_MAX)] = msgspec.field(default_factory=list)
