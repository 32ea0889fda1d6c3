"""The evidence of one recomputed submission, as its verdict carries it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peers.validator.evidence import betting, selection
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Evidence


@dataclass(frozen=True)
class Recomputed:
    """A submission's scores, from one prefill."""

    margins: npt.NDArray[np.float64]
    """[tokens] Margin (`peers.engines.winners.Judgement`), of certain tokens too."""
    errors: npt.NDArray[np.float64]
    """[chunks] Error of each proof (`peers.proofs.toploc.ChunkResult.error`)."""
    ties: Sequence[Sequence[Sequence[bool]]]
    """[groups][group size] Each rollout's near ties, True for a mismatch."""
    outcomes: Sequence[Sequence[Sequence[float]]]
    """[3][groups][group size] Reward, whether the rollout stopped, and its length."""


def evidence_of(found: Recomputed, honest: Thresholds) -> Evidence:
    """The gains of every bet, given the bounds on honest means."""
    margins = found.margins
    return Evidence(
        tokens=len(margins),
        mismatches=int((margins > 0).sum()),
        sampler=betting.gains(np.minimum(margins, 1.0), honest.honest_margin),
        policy=betting.gains(found.errors, honest.honest_proof_error),
        text=betting.gains((margins > honest.margin_max) * 1.0, honest.honest_outliers),
        selection=selection.gains(found.ties, found.outcomes),
    )


def without_bets(evidence: Evidence) -> Evidence:
    """What was recomputed, as no evidence against anyone."""
    return Evidence(tokens=evidence.tokens, mismatches=evidence.mismatches)


def bans(bets: Sequence[int]) -> float:
    """log10 of one submission's own e-value: 6 means odds of a million to one against chance."""
    return betting.log_e_value(bets) / math.log(10)
