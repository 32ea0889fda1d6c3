"""A rollout with all that is known about it: its text, rewards, advantage and verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarm.ledger.entries import Outcome
from swarm.rollouts.rollout import Finish, Kind
from swarm.rollouts.rollouts import parts_in
from swarm.wire.manifest import OF_GROUPS, Objective
from swarm.wire.messages import Verdict

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as the trainer does."""


@dataclass(frozen=True)
class Turn:
    kind: Kind
    tokens: list[int]
    text: str | None
    """The decoded tokens; None without a tokenizer."""
    finish: Finish | None
    log_probabilities: list[float] | None
    """As reported by the worker; never used for training."""
    policies: list[int]
    """Policies that the tokens were sampled from, in order."""
    policy_tokens: list[int]
    """How many from each."""
    in_loss: bool
    """Whether the loss covers these tokens."""


@dataclass(frozen=True)
class SeenSubmission:
    """Origin of a submission's rollouts, and the verdict on them (or on groups of them)."""

    submission: str
    """Its BLAKE3-256, hexadecimal."""
    run: str
    lineage: int
    step: int
    policy: int
    worker: str
    number: int
    engine: str
    """Empty if unknown: the trainer keeps rollouts without the file's header."""
    verdict: str | None
    """None if no log with the verdict was found."""
    failed: str | None
    """Name of the check that failed."""
    detail: str | None


@dataclass(frozen=True)
class Grades:
    """Rewards of one group, by sample; the lists are empty without a verdict."""

    rewards: Sequence[float] = ()
    parts: Sequence[Mapping[str, float]] = ()
    """What each reward is made of."""
    advantages: Sequence[float] = ()


@dataclass(frozen=True)
class SeenRollout:
    """One rollout of a submission."""

    origin: SeenSubmission
    group: int
    sample: int
    environment: str
    environment_version: str
    temperature: float | None
    turns: list[Turn]
    reward: float | None
    parts: Mapping[str, float]
    advantage: float | None
    outcome: Outcome | None
    """What the trainer did with its group; None if no log says it."""
    consumed_at: int | None
    """The step at which the trainer did so."""

    @property
    def group_key(self) -> tuple[str, int]:
        return self.origin.submission, self.group

    @property
    def model_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns if turn.kind == "model")

    @property
    def log_probability(self) -> float | None:
        """Sum over the model tokens, as the worker reports it."""
        values = [turn.log_probabilities for turn in self.turns if turn.kind == "model"]
        known = [each for each in values if each is not None]
        return sum(map(sum, known)) if len(known) == len(values) else None

    @property
    def policies(self) -> list[int]:
        """Policies that the tokens were sampled from, in order, without neighbouring repeats."""
        found: list[int] = []
        for turn in self.turns:
            found.extend(policy for policy in turn.policies if found[-1:] != [policy])
        return found

    @property
    def fate(self) -> str:
        """Verdict and outcome in a few words; empty if unknown."""
        words = self.origin.verdict or ""
        if self.origin.failed:
            words += f" by the check {self.origin.failed}"
        if self.outcome is not None:
            words += f", {self.outcome}"
        if self.consumed_at is not None:
            words += f" at step {self.consumed_at}"
        return words.removeprefix(", ")


def grades_of(verdict: Verdict, group: int, objective: Objective) -> Grades:
    """Rewards and advantages of a group; a quarantined group has none."""
    if not 0 <= group < len(verdict.rewards) or group in verdict.quarantined:
        return Grades()
    rewards = verdict.rewards[group]
    parts = parts_in(verdict.parts, verdict.rewards, group)
    return Grades(rewards, parts, advantages_of(rewards, objective))


def advantages_of(rewards: Sequence[float], objective: Objective) -> list[float]:
    """The advantages that the trainer gives a group's completions, computed without torch; without
    what process rewards add to those of single tokens."""
    if (
        objective.advantage not in OF_GROUPS
        or objective.overlong_tokens
        or objective.teacher_weight
    ):
        return []  # they depend on the rest of the batch, on lengths, or on the token
    values = np.array(rewards, np.float64)
    centred = values - values.mean()
    if objective.advantage == "rloo" and len(values) > 1:
        return list((centred * (len(values) / (len(values) - 1))).tolist())
    if objective.normalise_by_std and objective.name != "dr_grpo" and len(values) > 1:
        centred = centred / (values.std(ddof=1) + STD_EPSILON)
    return list(centred.tolist())


def as_row(seen: SeenRollout) -> dict[str, Any]:
    """Convert a rollout to plain data: the row that JSON and data sets have."""
    row = vars(seen.origin) | vars(seen)
    del row["origin"]
    return row | {
        "turns": [vars(turn) for turn in seen.turns],
        "parts": [{"name": name, "value": value} for name, value in seen.parts.items()],
    }
