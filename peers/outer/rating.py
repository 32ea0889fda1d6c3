"""What a stranger's contributions have shown so far, and how much they weigh.

In a run with `outer.admission = "scored"` the signer of a round record states what it measured of
each stranger's contribution (`peers.outer.learning.scoring`): two *scores*, in standard errors.
Ratings and weights follow from the scores of the chain's records, by the rules here. So every
trainer computes the same weights, and the chain keeps them. Several trainers score, and a
record's scores are the medians of theirs: one that lies moves a score within what the others say.
"""

from collections.abc import Collection, Mapping, Sequence
from statistics import median_low

from blake3 import blake3

from swarm.wire.outer import RATED_MAX, SCORE_MAX, Measured, Rated, RoundRecord

NOISE = 760
"""A rating of scores that are noise alone exceeds this with a probability of 2.3 %: two of its
standard deviations, each 1000 · √(1/7)."""

FULL = 1500
"""Rating from which a stranger weighs as much as a trainer. It takes three best rounds."""

FALLS = -2000
"""Score of one round that undoes every good one before."""

FORGOTTEN = 100
"""Ratings nearer to 0 are forgotten."""

DIFFERS = 1000
"""A score this far beyond what all others measured is no median of measurements."""


def updated(rating: int, score: int) -> int:
    """The rating after a score: the exponential mean of all, a quarter each."""
    after = (3 * rating + score) // 4
    return min(0, after) if score <= FALLS else after


Said = Mapping[str, Measured]
"""What one scorer says, by stranger."""


def _said(said: Collection[Said], trainer: str, of: bytes | None) -> list[list[int]]:
    """The gains and the own scores of a stranger by each scorer, 0 where it says nothing of this
    artifact; None: of any."""
    none = Measured(trainer, of or b"")
    found = [each.get(trainer, none) for each in said]
    found = [each if of in (None, each.artifact) else none for each in found]
    return [[each.gain for each in found], [each.own for each in found]]


def agreed(said: Collection[Said]) -> dict[str, Measured]:
    """For each stranger the medians of what the scorers measured, the lower of an even number; who
    did not measure it says 0. Of several contributions of one stranger, the best counts."""
    medians = [
        Measured(trainer, artifact, *map(median_low, _said(said, trainer, artifact)))
        for trainer, artifact in {
            (one.trainer, one.artifact) for each in said for one in each.values()
        }
    ]
    medians.sort(key=lambda each: (min(each.gain, each.own), each.artifact))
    return {each.trainer: each for each in medians}


def is_contradicted(record: RoundRecord, said: Collection[Said]) -> bool:
    """Whether a record scores a stranger otherwise than all of these scorers, on one side."""
    listed = {each.trainer: each.artifact.digest for each in record.contributions}
    stated = {each.trainer: (each.gain, each.own) for each in record.rated}
    return any(
        not min(theirs) - DIFFERS <= score <= max(theirs) + DIFFERS
        for trainer in stated.keys() | {trainer for each in said for trainer in each}
        for score, theirs in zip(
            stated.get(trainer, (0, 0)), _said(said, trainer, listed.get(trainer)), strict=True
        )
    )


def rate(before: Sequence[Rated], scores: Mapping[str, tuple[int, int]]) -> list[Rated]:
    """The ratings after a round: `scores` has the gain and the own score of each that contributed;
    others score 0. Sorted by peer id; of too many, those of this round stay, then the highest."""
    held = {each.trainer: (each.gain_rating, each.own_rating) for each in before}
    found = []
    for trainer in {*held, *scores}:
        gain, own = scores.get(trainer, (0, 0))
        ratings = [
            updated(*each) for each in zip(held.get(trainer, (0, 0)), (gain, own), strict=True)
        ]
        if gain or own or max(map(abs, ratings)) >= FORGOTTEN:
            found.append(Rated(trainer, gain, own, *ratings))
    found.sort(key=lambda each: (not each.is_scored, -weight(each), each.trainer))
    return sorted(found[:RATED_MAX], key=lambda each: each.trainer)


def weight(rated: Rated) -> float:
    """A stranger's weight beside a trainer's 1: 0 until its record is beyond noise. Both of its
    ratings count: what it sends must help, and must come from the data that it was assigned."""
    lower = min(rated.gain_rating, rated.own_rating)
    return min(1.0, max(0.0, (lower - NOISE) / (FULL - NOISE)))


def weights(rated: Sequence[Rated]) -> dict[str, float]:
    """The weights of a record's strangers; all others are trainers."""
    return {each.trainer: weight(each) for each in rated}


def clipped(score: float) -> int:
    """A score in standard errors, in thousandths, within its bounds."""
    return round(1000 * min(SCORE_MAX / 1000, max(-SCORE_MAX / 1000, score)))


def assignment(run: str, round: int, base: bytes, trainer: str) -> int:
    """Seed of the order in which a stranger learns the sequences of the data in a round. Nobody
    knows it before the base's record is signed, and each peer has another."""
    parts = (run.encode(), round.to_bytes(8, "big"), base, trainer.encode())
    return int.from_bytes(blake3(b"swarm/1/assignment\x00" + b"\x00".join(parts)).digest(8)) >> 1
