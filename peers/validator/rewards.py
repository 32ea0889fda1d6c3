"""A submission's rewards from its grades and length penalties."""

from __future__ import annotations

from itertools import chain

from swarm.jobs.validation import Inspected, PartlyGraded
from swarm.rollouts.rollouts import parts_of


def settle(inspected: Inspected, partly: PartlyGraded) -> None:
    """Give `inspected` the rewards of complete grades; those of an ungraded group are 0.

    It gets no rewards if no group is graded.
    """
    inspected.ungraded = sorted(partly.ungraded, key=lambda each: each.group)
    without = {each.group for each in partly.ungraded}
    if len(without) == len(partly.graded):
        return
    size = max(map(len, partly.graded))
    for group in without:
        partly.graded[group] = [0.0] * size
        partly.penalties[group] = [0.0] * size
        partly.parts[group] = [{}] * size
    inspected.rewards = [
        [reward - penalty for reward, penalty in zip(*group, strict=True)]
        for group in zip(partly.graded, partly.penalties, strict=True)
    ]
    inspected.parts = parts_of(list(chain(*partly.parts)))
    if partly.has_target:
        inspected.task_means = [sum(group) / len(group) for group in partly.graded]
        inspected.task_spreads = [max(group) - min(group) for group in partly.graded]
