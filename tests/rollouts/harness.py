"""Helpers for tests with rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.rollouts.rollout import Rollout
from swarm.rollouts.rollouts import Rollouts, Row


def single_turns(
    *,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    proofs: Sequence[bytes],
    log_probabilities: Sequence[Sequence[float]] | None = None,
    group: Sequence[int],
    sample: Sequence[int],
    environment: Sequence[int] | None = None,
    stop_ids: Sequence[int] = (2,),
    policy: int = 1,
) -> Rollouts:
    """Single-turn rollouts from lists, one entry per row."""
    rows = []
    for row, completion in enumerate(completions):
        rollout = Rollout.single_turn(
            prompts[row],
            completion,
            finish="stop" if completion[-1] in stop_ids else "length",
            policy=policy,
            log_probabilities=(log_probabilities or [[-1.0] * len(c) for c in completions])[row],
        )
        index = environment[row] if environment else 0
        rows.append(Row(group[row], sample[row], index, rollout, proofs[row]))
    return Rollouts.from_rows(rows)


def completion(rollouts: Rollouts, row: int) -> list[int]:
    """Token ids of a row's model segments."""
    return rollouts.rollout(row).model_tokens
