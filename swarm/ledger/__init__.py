"""The trusted peers' append-only logs, and the credits and evictions computed from them.

For other rooms: `archive`: Archive; `audit`: *, Audited, audit; `capital`: UNITS_PER_NAT, log_mean,
rounded; `client`: LedgerClient, open_ledger, own_head; `derived`: DerivedTables, deriving,
keep_verdict; `entries`: CheckpointPublished, Consumed, Entry, Evicted, Judged, Outcome, Redeemed,
Reinstated, RoundFigures, Sealed, TrainingFigures, decode, expulsions_in, judged; `epochs`: *;
`evidence`: Standing, WORDS, WorkerEvidence, evidence_in; `faults`: Fault, FaultStore,
decode_record, path_of; `log`: Log; `merkle`: *; `mirror`: Fork, LogMirror, forks_in; `proof_file`:
*, KEPT_PROOFS, KeptProofs, Proven, file_of, proven_in; `receipts`: receipts_from; `record`: Rules,
Work, share_to_recompute; `redeemed_invites`: RedeemedInvites; `ruling`: *, binds, settles;
`sealing`: *, Books, FalseSeal, Place, Seals; `serving`: serving_ledger; `state`: Authority,
Frontier, Record, Totals; `wire`: ForkEvidence, Origin, RECEIPTS_MAX, Status, explained
"""
