"""The trusted peers' append-only logs, and the credits and evictions computed from them.

For other rooms, by the names in docs/rooms.md: `archive`, `audit`, `capital`, `client`, `derived`,
`entries`, `epochs`, `evidence`, `faults`, `log`, `merkle`, `mirror`, `proof_file`, `receipts`,
`record`, `redeemed_invites`, `ruling`, `sealing`, `serving`, `state`, `wire`
"""
