"""The evidence of one recomputed submission, as its verdict carries it: bets on bounded scores.

A bet's capital grows only if scores exceed their honest mean: Waudby-Smith and Ramdas, "Estimating
means of bounded random variables by betting" (JRSS B 2023). A score s in [0, 1] has an honest
conditional mean of at most `mean`, given everything before it. A bet of stake λ multiplies its
capital by 1 + λ(s − mean). While the mean holds, that factor is at most 1 on average, so the
capital is a supermartingale: by Ville's inequality it ever reaches 1/α with probability at most α.
No bet is best against every lie, so a process places a few, and the average of their capitals is a
supermartingale too."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peers.validator.evidence import selection
from swarm.ledger.capital import UNITS_PER_NAT, log_mean, rounded
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import Evidence

STAKES = (2.0, 8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0)
"""λ is best at (true mean − honest mean) / mean square of the score: small for a small shift of a
large mean, large for rare scores. Steps of 4 lose at most a third of the best growth rate."""


def stakes(mean: float) -> list[float]:
    """The stakes against scores of an honest `mean`; no score loses more than half of a capital."""
    if not 0 < mean < 1:
        raise ValueError(f"an honest mean of {mean} is not between 0 and 1")
    return [min(stake, 0.5 / mean) for stake in STAKES]


def gains(scores: npt.NDArray[np.floating[Any]], mean: float) -> list[int]:
    """The growth of each bet's log capital over `scores`, in thousandths of a nat, rounded down.

    Rounding down keeps the capital a supermartingale. Raises `ValueError` for one beyond [0, 1]."""
    # Negated, so that NaN is refused too.
    if len(scores) and not (scores.min() >= 0 and scores.max() <= 1):
        raise ValueError("a score lies outside [0, 1]")
    return [rounded(float(np.log1p(stake * (scores - mean)).sum())) for stake in stakes(mean)]


def log_e_value(bets: Sequence[int]) -> float:
    """log of one submission's own e-value: the mean capital of bets that began with 1."""
    return log_mean([bet / UNITS_PER_NAT for bet in bets])


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
        sampler=gains(np.minimum(margins, 1.0), honest.honest_margin),
        policy=gains(found.errors, honest.honest_proof_error),
        text=gains((margins > honest.margin_max) * 1.0, honest.honest_outliers),
        selection=selection.gains(found.ties, found.outcomes),
    )


def without_bets(evidence: Evidence) -> Evidence:
    """What was recomputed, as no evidence against anyone."""
    return Evidence(tokens=evidence.tokens, mismatches=evidence.mismatches)


def bans(bets: Sequence[int]) -> float:
    """log10 of one submission's own e-value: 6 means odds of a million to one against chance."""
    return log_e_value(bets) / math.log(10)
