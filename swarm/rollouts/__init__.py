"""Rollouts: their data structures, the submission file, and the seeds that determine them.

For other rooms, by the names in docs/rooms.md: `continuations`, `rollout`, `rollouts`, `seeds`,
`signed_turns`, `submission_file`
"""
