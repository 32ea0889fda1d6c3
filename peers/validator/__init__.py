"""Validators: they check submissions, judge them, and sign the verdicts.

For other rooms:

- `evidence`: betting
- `evidence.submission`: Recomputed, without_bets
- `recompute`: Completed, Found, judge_sampling, recompute
- `role`: ValidatorRole
"""
