"""A worker: what it hands in for the work of a submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.calibration.workload import Work
from peers.engines.batch import generate, requests_for
from peers.engines.engine import Engine, Piece
from peers.proofs import toploc
from swarm.wire.manifest import Sampling


@dataclass(frozen=True)
class HandedIn:
    """A submission's completions and proofs, row by row."""

    completions: list[list[int]]
    proofs: list[list[bytes]]


@dataclass(frozen=True)
class Generates:
    """Generates with an engine, `batch` rows at a time. Honest with the policy and these defaults.

    `attempt` is not 0 for text generated before the seed was known.
    """

    engine: Engine
    batch: int = 1 << 20
    threads: int = 1
    temperature_factor: float = 1.0
    attempt: int = 0

    def submit(self, work: Work, sampling: Sampling) -> HandedIn:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            parts = [
                self._generate(
                    work, sampling, range(start, min(start + self.batch, len(work.prompts)))
                )
                for start in range(0, len(work.prompts), self.batch)
            ]
        finally:
            torch.set_num_threads(before)
        return HandedIn(
            [piece.tokens for part in parts for piece in part],
            [proofs for part in parts for proofs in prove_pieces(part)],
        )

    def _generate(self, work: Work, sampling: Sampling, rows: range) -> list[Piece]:
        requests = requests_for(
            [work.prompts[row] for row in rows],
            rows,
            work.key(self.attempt),
            sampling.temperature * self.temperature_factor,
            sampling.stop_ids,
            sampling.max_new_tokens,
        )
        return generate(self.engine, requests)


def prove(prompt_hidden: Sequence[Tensor], hidden: Sequence[Tensor]) -> list[list[bytes]]:
    """The proofs of each row."""
    chunks = [toploc.chunk_rows(*each) for each in zip(prompt_hidden, hidden, strict=True)]
    proofs = iter(toploc.build([chunk for row in chunks for chunk in row]))
    return [[next(proofs) for _ in row] for row in chunks]


def prove_pieces(pieces: Sequence[Piece]) -> list[list[bytes]]:
    """The proofs of each piece."""
    return prove([each.prompt_hidden for each in pieces], [each.hidden for each in pieces])
