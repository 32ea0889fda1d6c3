"""What is gossiped in a run, and on which topic."""

from __future__ import annotations

from swarm.messages import (
    Acknowledgement,
    Checkpoint,
    Eviction,
    LogHead,
    Message,
    Presence,
    Reinstatement,
    RunManifest,
    StepOrder,
    Verdict,
)

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
peers may say any of these (`Run.permits`), so no stranger can make others forward or store a thing.
"""

STATES_FIRST = (RunManifest, Checkpoint, StepOrder, LogHead, Presence)
"""In this order a neighbour is offered the newest states; evictions and events follow."""

LASTING = (Eviction, Reinstatement)
"""Events that newcomers must learn of, however long ago they happened."""
