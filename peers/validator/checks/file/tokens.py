"""Every token id is in the model's vocabulary, and every row fits into its context."""

from __future__ import annotations

import numpy as np

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection


class Tokens(Check[Inspection]):
    """Figure: tokens outside the vocabulary, and those beyond the model's context.

    All segments count: an environment that fails may leave its turns without a replay.
    """

    name = "tokens"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        tokens = evidence.rollouts.tokens
        outside = int(((tokens < 0) | (tokens >= evidence.vocabulary)).sum())
        lengths = np.diff(evidence.rollouts.token_offsets)
        beyond = int((lengths - evidence.limits.positions_max).clip(min=0).sum())
        return at_most(
            outside + beyond,
            0,
            f"{outside} token ids lie outside the vocabulary, {beyond} tokens beyond the context",
        )
