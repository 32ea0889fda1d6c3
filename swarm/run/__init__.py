"""A run: its signed manifest and its versions, and its members.

The owner signs a *run manifest*. The run's id is `<owner peer id>/<name>`.

For other rooms: `admission`: ADMISSION_LEASE_SECONDS, NotAdmitted, ROLES, TRUSTED_ROLES, admits,
check_admission, is_worker; `allowed`: ALLOWED_VARIABLE, allow_environments, allowed_environments;
`bounds`: check_batch, check_peer_id; `changes`: changes; `choice`: check_joined, choose_run,
joined_runs, pin_owner, terms, topics; `clock`: TrustedClock; `findings`: *, Finding, Work, attempt,
lines, within; `heard_verdicts`: HeardVerdicts, Key, failed_check, nearest, report_contradictions,
verdict_in; `invites`: Invites, check_token, invite_in, make_invite; `lease`: GOODBYE_SECONDS,
HEARTBEAT_SECONDS, LeaseKeeper; `links`: Link, invite_of, make_link, parse_link; `manifest`:
MANIFEST_LIFETIME_SECONDS, Outgrown, content_digest, load_manifest, manifest_in, run_id;
`manifest_exchange`: BOOTSTRAP_SECONDS, ask_for_manifests, serve_manifests; `participant`:
Participant; `recipes`: RECIPES; `records`: checkpoint_key, peer_key, record_validators, run_key;
`registrar`: Registrar; `run`: Run, VERSION_REFUSED; `toml`: RunHashes, describe_run,
manifest_from_toml, unhashed_manifest; `update`: check_update, hand_over, listed, sign_manifest,
sign_takeover, signed_before; `work`: ORDER_WAIT_SECONDS, OrderBook, check_rendering, judges_of,
receipt_in, renders_otherwise, submission_order
"""
