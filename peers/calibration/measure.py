"""Recompute a submission as a validator does, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.calibration.workers import HandedIn
from peers.calibration.workload import Work
from peers.engines.engine import Engine
from peers.validator.recompute import Completed, Found, recompute
from swarm.wire.manifest import Sampling, Thresholds


@dataclass(frozen=True)
class Sample:
    """One submission, recomputed."""

    found: Found
    lengths: Sequence[int]
    """Tokens of each rollout."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


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
