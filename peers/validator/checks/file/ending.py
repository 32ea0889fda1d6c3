"""A completion ends at its first stop token or at the length limit, with nothing after."""

from __future__ import annotations

import numpy as np

from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection


class Ending(Check[Inspection]):
    """Figure: completions that end elsewhere."""

    name = "ending"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        rollouts, longest = evidence.rollouts, evidence.max_new_tokens
        stops = np.isin(rollouts.completion_tokens, list(evidence.stop_ids))
        last = rollouts.completion_offsets[1:] - 1
        lengths = np.diff(rollouts.completion_offsets)
        stops_in_row = np.add.reduceat(stops.astype(np.int64), rollouts.completion_offsets[:-1])
        after = stops_in_row != stops[last]  # a stop token that is not the last
        early = ~stops[last] & (lengths != longest)
        wrong = after | early | (lengths > longest)
        detail = ""
        if wrong.any():
            row = int(wrong.argmax())
            what = "goes on after a stop token" if after[row] else "ends where no ending is"
            detail = f"the completion of row {row} {what}"
        return at_most(int(wrong.sum()), 0, detail)
