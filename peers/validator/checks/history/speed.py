"""The worker does not generate faster than a single machine can."""

from __future__ import annotations

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.history.evidence import History

WORKER_TOKENS_PER_SECOND_MAX = 1e6
"""No single peer generates faster. A worker that submits more pools the work of several machines
or fabricates it."""


class Speed(Check[History]):
    """Figure: completion tokens per second.

    Other machines may have helped, so a failure only withholds the submission.
    """

    name = "speed"
    quarantines = True

    def examine(self, evidence: History) -> Finding:
        return at_most(
            evidence.tokens_per_second,
            WORKER_TOKENS_PER_SECOND_MAX,
            "more tokens a second than any one machine generates",
        )
