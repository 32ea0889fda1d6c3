"""Let a worker generate and a validator recompute, as in a run, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from peers.calibration.workers import HandedIn, Worker
from peers.calibration.workload import Work, Workload
from peers.engines.engine import Engine
from peers.validator.evidence.submission import Recomputed
from peers.validator.recompute import Completed, Found, recompute
from swarm.wire.manifest import Sampling, Thresholds

_T = TypeVar("_T")


@dataclass(frozen=True)
class Sample:
    """One submission, recomputed."""

    found: Found
    recomputed: Recomputed
    completions: int

    @property
    def tokens(self) -> int:
        return len(self.found.margins)

    @property
    def reward(self) -> float:
        """Mean reward."""
        rewards = [reward for group in self.recomputed.outcomes[0] for reward in group]
        return sum(rewards) / len(rewards)


def sample(
    worker: Worker, validator: Engine, workload: Workload, number: int, name: str = "calibration"
) -> Sample:
    """Let `worker` do the work of submission `number`, and recompute it."""
    work, sampling = workload.work(number, name), workload.sampling
    handed_in = worker.submit(work, sampling)
    return sample_of(find(validator, work, sampling, handed_in), work, sampling, handed_in)


def find(validator: Engine, work: Work, sampling: Sampling, handed_in: HandedIn) -> Found:
    """What a validator finds of a submission."""
    completions = handed_in.completions
    sequences = [
        [*prompt, *tokens] for prompt, tokens in zip(work.prompts, completions, strict=True)
    ]
    given = Completed(
        sequences=sequences,
        sampled=[
            list(range(len(prompt), len(sequence)))
            for prompt, sequence in zip(work.prompts, sequences, strict=True)
        ],
        rows=range(len(sequences)),
        proofs=handed_in.proofs,
    )
    return recompute(validator, given, work.key(), sampling.temperature, Thresholds())


def sample_of(found: Found, work: Work, sampling: Sampling, handed_in: HandedIn) -> Sample:
    """What was found of a submission, with the outcomes of its rollouts."""
    recomputed = Recomputed(
        margins=found.margins,
        errors=found.errors,
        ties=_grouped(list[Sequence[bool]](found.ties), sampling.group_size),
        outcomes=_outcomes(work, handed_in.completions, sampling),
    )
    return Sample(found, recomputed, len(handed_in.completions))


def _outcomes(
    work: Work, completions: list[list[int]], sampling: Sampling
) -> list[list[list[float]]]:
    """Reward, whether the rollout stopped, and its length: [3][groups][group size]."""
    size = sampling.group_size
    rewards = [work.rewards(row, tokens) for row, tokens in enumerate(completions)]
    stopped = [float(tokens[-1] in sampling.stop_ids) for tokens in completions]
    lengths = [float(len(tokens)) for tokens in completions]
    return [_grouped(each, size) for each in (rewards, stopped, lengths)]


def _grouped(rows: list[_T], size: int) -> list[list[_T]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
