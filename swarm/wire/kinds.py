"""Every kind of message that a signed envelope may carry."""

from swarm.wire import messages, turns
from swarm.wire.manifest import RunManifest
from swarm.wire.outer import Offer, OuterStatus, RoundRecord

KINDS: dict[str, type[messages.Message]] = {
    "peer_record": messages.PeerRecord,
    "heartbeat": messages.Heartbeat,
    "presence": messages.Presence,
    "run_manifest": RunManifest,
    "admission_request": messages.AdmissionRequest,
    "invite": messages.Invite,
    "admission": messages.Admission,
    "admission_refused": messages.AdmissionRefused,
    "checkpoint": messages.Checkpoint,
    "step_order": messages.StepOrder,
    "submission": messages.Submission,
    "acknowledgement": messages.Acknowledgement,
    "verdict": messages.Verdict,
    "eviction": messages.Eviction,
    "reinstatement": messages.Reinstatement,
    "log_head": messages.LogHead,
    "evaluation": messages.Evaluation,
    "turn": turns.Turn,
    "turn_request": turns.TurnRequest,
    "turn_refused": turns.TurnRefused,
    "episode_tokens": turns.EpisodeTokens,
    "grade_request": turns.GradeRequest,
    "episode_grade": turns.EpisodeGrade,
    "outer_status": OuterStatus,
    "round_record": RoundRecord,
    "outer_offer": Offer,
}
"""Message types by the wire name of their kind."""

_KIND_OF = {message_type: kind for kind, message_type in KINDS.items()}


def kind_of(message: messages.Message) -> str:
    """The wire name of a message's kind."""
    return _KIND_OF[type(message)]
