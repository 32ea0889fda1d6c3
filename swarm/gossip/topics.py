"""The messages that are gossiped in a run, and their topics."""

from __future__ import annotations

from swarm.wire.manifest import RunManifest
from swarm.wire.messages import (
    Acknowledgement,
    Checkpoint,
    Evaluation,
    Eviction,
    LogHead,
    Message,
    Presence,
    Reinstatement,
    StepOrder,
    Verdict,
)
from swarm.wire.outer import OuterStatus, RoundRecord

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
    Evaluation: WORK,
    LogHead: WORK,
    OuterStatus: WORK,
    RoundRecord: WORK,
}
"""The topic of each message type. Other types are never gossiped. Only the owner and trusted peers
may send these (`Run.permits`), so no stranger can make others forward or store anything."""

STATES_FIRST = (
    RunManifest,
    Checkpoint,
    StepOrder,
    LogHead,
    Presence,
    OuterStatus,
    Evaluation,
)
"""State messages in the order in which a neighbour is offered them; evictions and events follow."""

LASTING = (Eviction, Reinstatement)
"""Events that newcomers must learn of, however long ago they happened."""

ROUTINE = (Checkpoint, StepOrder)
"""States that come with every step. A neighbour that gets them from others as early gets only their
digests, at the next tick. All other messages are rare or urgent and always pushed."""
