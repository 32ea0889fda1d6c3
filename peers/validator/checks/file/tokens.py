"""Every sampled token id is in the model's vocabulary."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection


class Tokens(Check[Inspection]):
    """Figure: model tokens outside the vocabulary."""

    name = "tokens"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        tokens = evidence.rollouts.tokens[evidence.rollouts.sampled_mask()]
        outside = int(((tokens < 0) | (tokens >= evidence.vocabulary)).sum())
        return at_most(outside, 0, f"{outside} token ids lie outside the vocabulary")
