"""What is in a submission's file."""

from __future__ import annotations

from pathlib import Path

from swarm.rollouts.submission_file import ReadLimits, read

LIMITS = ReadLimits(1 << 20, 1 << 10, 1 << 10, 1 << 10, 1 << 10)


def tokens_of(path: Path) -> list[list[int]]:
    """The model tokens of each row."""
    rollouts = read(path, LIMITS).rollouts
    return [rollouts.rollout(row).tokens for row in range(len(rollouts))]
