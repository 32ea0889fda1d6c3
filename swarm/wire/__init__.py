"""What peers say to each other: identities, signed envelopes, and the messages.

| File | What it holds |
|---|---|
| `identity.py` | Ed25519 keys and peer ids |
| `envelope.py`, `kinds.py` | signed, expiring messages, and the gate that checks all of them |
| `messages.py`, `manifest.py`, `turns.py`, `outer.py` | the messages |
| `messenger.py` | signed requests and replies |
| `protocol.py`, `succession.py` | versions; who may sign a manifest |

For other rooms: `envelope`: *, BAN_SECONDS, CLOCK_SKEW_SECONDS_MAX, Dropped, ENVELOPE_BYTES_MAX,
ENVELOPE_VERSION, EVENT_LIFETIME_SECONDS, Envelope, FUTURE_SECONDS_MAX, Gate, NeedsNewer,
SEEN_ENVELOPES_MAX, STATE_LIFETIME_SECONDS, Sequencer, TRUSTED_STATE_LATE_SECONDS_MAX,
open_envelope, readable, remembering_envelopes, seal; `identity`: Identity, InvalidPeerId, KEY_FILE,
PeerId, check_home_identity, home_identity, id_in_home, load_or_create, peer_id_bytes,
peer_id_from_bytes, public_key_of, verify; `manifest`: *, ADAPTER_RANK_MAX, ADAPTER_TARGETS,
ADVANTAGES, Adapter, Admissions, Compression, EnvironmentReference, Limits, OBJECTIVES, OF_GROUPS,
Objective, Optimiser, OptionValue, Outer, ProcessRewards, RunManifest, SHARDS_MAX, Sampling,
Schedule, TRAINERS_MAX, Thresholds, TrustedKey, VERSION_MAX, Values, labels, one_or_each;
`messages`: *, Acknowledgement, Admission, AdmissionRefused, AdmissionRequest, Arrival, Check,
Checkpoint, CheckpointReference, Count, DOING_REPEATED_MAX, Digest, ENVIRONMENTS_MAX,
EnvironmentEvaluation, Evaluation, Eviction, Evidence, Heartbeat, INVITE_ID_BYTES, Invite, Key,
LOST_MAX, Line, LogHead, Message, Name, PeerRecord, PeerState, Presence, Present, REWARD_PARTS_MAX,
REWARD_VALUES_MAX, ROLE_PATTERN, Reinstatement, RewardParts, Rewards, SOURCE_BYTES, Slot,
StateMessage, StepOrder, Submission, Verdict; `messenger`: Messenger, REQUEST_DEADLINE_SECONDS,
REQUEST_ENVELOPES_MAX, first; `outer`: CONTRIBUTION_TOKENS_MAX, Contribution, DISPUTED_MAX, GENESIS,
HeldShards, MERGED_MAX, Measured, MergedShard, Offer, OuterStatus, RATED_MAX, Rated, RoundRecord,
SCORE_MAX, Stage; `protocol`: PROTOCOL_VERSION, UPGRADE, protocol_problem; `succession`:
NotAuthorised, Ownership, inherited, ownership, ownership_of, taken_over; `turns`: *, EpisodeGrade,
EpisodeRequest, EpisodeTokens, GradeRequest, PACKED_BYTES_MAX, TOKEN_BYTES, Turn, TurnRefused,
TurnRequest, divided, pack, packed_digest, segments_of, tokens_digest, unpack
"""
