"""Signed records for the tests of several trainers."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from swarm.wire.envelope import Envelope, seal
from swarm.wire.identity import Identity
from swarm.wire.messages import CheckpointReference
from swarm.wire.outer import GENESIS, Contribution, RoundRecord

RUN = "owner/run"
TRAINERS = [Identity(bytes([number]) * 32) for number in range(1, 6)]


def contribution(
    trainer: int, base: bytes = GENESIS, base_round: int = 0, tokens: int = 10, name: str = ""
) -> Contribution:
    """A contribution whose files are named by trainer, base and `name`."""
    identity = TRAINERS[trainer]
    files = blake3(identity.peer_id.encode() + base + name.encode()).digest()
    return Contribution(
        trainer=identity.peer_id,
        base=base,
        base_round=base_round,
        artifact=CheckpointReference(lineage=1, step=base_round, digest=files, size_bytes=100),
        total_bytes=1000,
        tokens=tokens,
    ).signed(identity, RUN)


def record(
    contributions: Sequence[Contribution],
    parent: Envelope | None = None,
    *,
    signer: int = 0,
    tokens: int | None = None,
    round: int | None = None,
) -> Envelope:
    """A record after `parent` (None: of round 1), by default with right figures."""
    before = parent.expect(RoundRecord) if parent is not None else None
    message = RoundRecord(
        round=round or (before.round if before else 0) + 1,
        parent=parent.digest if parent is not None else GENESIS,
        state=bytes(32),
        contributions=sorted(contributions, key=lambda each: each.trainer),
        tokens=(before.tokens if before else 0) + sum(each.tokens for each in contributions)
        if tokens is None
        else tokens,
    )
    return seal(
        TRAINERS[signer], message, run=RUN, sequence=1, wall_time=1e9, lifetime_seconds=3600.0
    )
