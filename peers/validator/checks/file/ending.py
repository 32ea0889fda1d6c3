"""Every model segment ends at its first stop token or at the token limit."""

from __future__ import annotations

import numpy as np

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection
from swarm.rollouts.rollouts import FINISHES, MODEL


class Ending(Check[Inspection]):
    """Figure: rollouts with a segment that ends elsewhere or contradicts its finish reason."""

    name = "ending"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        rollouts, limits = evidence.rollouts, evidence.limits
        stops = np.isin(rollouts.tokens, list(limits.stop_ids))
        ends = np.cumsum(rollouts.segment_lengths, dtype=np.int64)
        stops_in_segment = np.add.reduceat(stops.astype(np.int64), ends - rollouts.segment_lengths)
        stopped = stops[ends - 1]
        model = rollouts.segment_kinds == MODEL
        after = model & (stops_in_segment != stopped)  # a stop token that is not the last
        said = rollouts.segment_finishes == FINISHES.index("stop")
        full = np.repeat(
            rollouts.model_lengths() == limits.max_new_tokens, rollouts.segment_counts()
        )
        elsewhere = model & ((said != stopped) | (~stopped & ~full))
        starts = rollouts.segment_offsets[:-1]
        rows_after = np.logical_or.reduceat(after, starts)
        too_long = rollouts.model_lengths() > limits.max_new_tokens
        wrong = rows_after | np.logical_or.reduceat(elsewhere, starts) | too_long
        detail = ""
        if wrong.any():
            row = int(wrong.argmax())
            what = "continues after a stop token"
            if not rows_after[row]:
                what = "ends before a stop token and the token limit, after the limit, "
                what += "or with a wrong finish reason"
            detail = f"a model segment of row {row} {what}"
        return at_most(int(wrong.sum()), 0, detail)
