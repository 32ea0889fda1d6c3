"""Validators: they check submissions, judge them, and sign the verdicts.

For other rooms, by the names in docs/rooms.md: `evidence.submission`, `recompute`, `role`
"""
