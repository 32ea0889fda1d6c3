"""Every kind of message that a signed envelope may carry."""

from __future__ import annotations

from swarm.wire.manifest import RunManifest
from swarm.wire.messages import (
    Acknowledgement,
    Admission,
    AdmissionRefused,
    AdmissionRequest,
    Checkpoint,
    Evaluation,
    Eviction,
    Heartbeat,
    Invite,
    LogHead,
    Message,
    PeerRecord,
    Presence,
    Reinstatement,
    StepOrder,
    Submission,
    Verdict,
)
from swarm.wire.outer import OuterStatus, RoundRecord
from swarm.wire.turns import (
    EpisodeGrade,
    EpisodeTokens,
    GradeRequest,
    Turn,
    TurnRefused,
    TurnRequest,
)

KINDS: dict[str, type[Message]] = {
    "peer_record": PeerRecord,
    "heartbeat": Heartbeat,
    "presence": Presence,
    "run_manifest": RunManifest,
    "admission_request": AdmissionRequest,
    "invite": Invite,
    "admission": Admission,
    "admission_refused": AdmissionRefused,
    "checkpoint": Checkpoint,
    "step_order": StepOrder,
    "submission": Submission,
    "acknowledgement": Acknowledgement,
    "verdict": Verdict,
    "eviction": Eviction,
    "reinstatement": Reinstatement,
    "log_head": LogHead,
    "evaluation": Evaluation,
    "turn": Turn,
    "turn_request": TurnRequest,
    "turn_refused": TurnRefused,
    "episode_tokens": EpisodeTokens,
    "grade_request": GradeRequest,
    "episode_grade": EpisodeGrade,
    "outer_status": OuterStatus,
    "round_record": RoundRecord,
}
"""Message types by the wire name of their kind."""

_KIND_OF = {message_type: kind for kind, message_type in KINDS.items()}


def kind_of(message: Message) -> str:
    """The wire name of a message's kind."""
    return _KIND_OF[type(message)]
