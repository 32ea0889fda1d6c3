"""Validators: they check submissions, judge them, and sign the verdicts.

For other rooms: `evidence.submission`: Recomputed, gains, without_bets; `recompute`: Completed,
Found, judge_sampling, recompute; `role`: ValidatorRole
"""
