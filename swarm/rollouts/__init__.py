"""Rollouts: their data structures, the submission file, and the seeds that determine them.

For other rooms: `continuations`: BadStates, Continued, STATES_BYTES_MAX, State, continued_groups,
decode_states, encode_states, whole; `rollout`: Finish, Kind, Rollout, Segment, Span, TURNS_MAX;
`rollouts`: FINISHES, MODEL, Offsets, Rollouts, Row, bounded, check_digest, mean_parts, parts_in,
parts_of; `seeds`: *, Draws, digest, environment_of_group, noise_key, nonce_of, rendezvous,
submission_seed, task_seed; `signed_turns`: BadTurn, check_turns, has_room, is_answered, open_turn;
`submission_file`: BadSubmission, Header, ReadLimits, decode, read, read_header, write
"""
