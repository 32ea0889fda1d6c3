"""A submission's rewards from its grades and length penalties."""

from __future__ import annotations

from swarm.jobs.validation import Inspected, PartlyGraded


def settle(inspected: Inspected, partly: PartlyGraded) -> None:
    """Give `inspected` the rewards of complete grades."""
    inspected.rewards = [
        [reward - penalty for reward, penalty in zip(*group, strict=True)]
        for group in zip(partly.graded, partly.penalties, strict=True)
    ]
    if partly.has_target:
        inspected.task_means = [sum(group) / len(group) for group in partly.graded]
        inspected.task_spreads = [max(group) - min(group) for group in partly.graded]
