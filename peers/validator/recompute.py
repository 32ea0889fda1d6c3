"""Recompute a submission: activations against proofs, tokens against logits and noise."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peers.engines.engine import Engine, Prefill
from peers.engines.noise import Drawn
from peers.engines.winners import margins
from peers.proofs import toploc
from peers.validator.evidence.selection import TIE_WIDTH
from swarm.errors import UserError
from swarm.jobs.validation import ProofFigures, SamplingFigures
from swarm.wire.manifest import Thresholds
from swarm.world.progress import checkpoint

MARGIN_CAP = 1e6
"""Largest margin reported. A token with noise −∞, which cannot be sampled, has an infinite
margin, but figures must be finite."""

ENTRIES_MAX = 1 << 22
"""Token positions × vocabulary judged at once: logits and noise take about 60 bytes per entry."""


@dataclass(frozen=True)
class Completed:
    """Rollouts to recompute, row by row."""

    sequences: Sequence[Sequence[int]]
    """All tokens of each rollout."""
    sampled: Sequence[Sequence[int]]
    """Indices of the sampled tokens in each sequence."""
    rows: Sequence[int]
    """Row of each rollout in its submission."""
    proofs: Sequence[Sequence[bytes]]
    """The chunks' proofs of each rollout."""
    starts: Sequence[int] = ()
    """Position in its episode of each rollout's first sampled token; empty: 0 for all."""


@dataclass(frozen=True)
class Found:
    """The figures of some rollouts."""

    chunks: list[toploc.ChunkResult]
    errors: npt.NDArray[np.float64]
    """[chunks] Error of each proof."""
    margins: npt.NDArray[np.float64]
    """[tokens] All rollouts end to end."""
    ties: list[list[bool]]
    """[rollouts] Ties (less than `TIE_WIDTH`) by position, True where the claimed token lost."""
    log_probabilities: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """[tokens] Of the claimed tokens, under the policy; only if asked for (`scored`)."""


@torch.inference_mode()
def recompute(
    engine: Engine,
    given: Completed,
    key: tuple[int, int],
    temperature: float,
    thresholds: Thresholds,
    *,
    scored: bool = False,
) -> Found:
    """Prefill in one batch and compare; `key`: of the noise. Raises `ProofFormatError`, and
    `UserError` when the policy's own figures are no numbers."""
    prefill = engine.prefill(given.sequences, given.sampled)
    for row, states in zip(given.rows, prefill.states, strict=True):
        if not bool(torch.isfinite(states).all()):
            raise UserError(
                f"the policy gives hidden states that are not numbers here (row {row}); its "
                "weights are broken or this device computes wrongly, so nothing is refused"
            )
    chunks = [
        chunk
        for before, hidden in zip(prefill.prompt_hidden, prefill.hidden, strict=True)
        for chunk in toploc.chunk_rows(before, hidden)
    ]
    results = toploc.verify(
        chunks, [proof for proofs in given.proofs for proof in proofs], thresholds
    )
    completions = [
        [tokens[index] for index in indices]
        for tokens, indices in zip(given.sequences, given.sampled, strict=True)
    ]
    missed, gaps, log_probabilities = judge_sampling(
        engine,
        prefill,
        completions,
        given.rows,
        key,
        temperature,
        starts=given.starts,
        scored=scored,
    )
    ends = np.cumsum([len(completion) for completion in completions])[:-1]
    near = np.where(missed > 0, missed, gaps) < TIE_WIDTH
    ties = [
        lost[tied].tolist()
        for lost, tied in zip(np.split(missed > 0, ends), np.split(near, ends), strict=True)
    ]
    errors = np.array([result.error for result in results])
    return Found(results, errors, missed, ties, log_probabilities)


@torch.inference_mode()
def judge_sampling(
    engine: Engine,
    prefill: Prefill,
    completions: Sequence[Sequence[int]],
    rows: Sequence[int],
    key: tuple[int, int],
    temperature: float,
    entries_max: int = ENTRIES_MAX,
    starts: Sequence[int] = (),
    *,
    scored: bool = False,
) -> npt.NDArray[np.float64]:
    """[3, tokens] (`peers.engines.winners.margins`), `entries_max` entries at a time. Every token
    is judged, so both a stop token and its absence are."""
    parts: list[Tensor] = []
    states = torch.cat(prefill.states)  # [n, hidden], all completions end to end
    device = states.device
    tokens = torch.tensor([token for row in completions for token in row], device=device)
    lengths = torch.tensor([len(completion) for completion in completions], device=device)
    row_index = torch.tensor(list(rows), device=device).repeat_interleave(lengths)
    positions = torch.cat(
        [
            torch.arange(start, start + len(row), device=device)
            for start, row in zip(starts or [0] * len(completions), completions, strict=True)
        ]
    )
    step = max(1, entries_max // engine.capabilities.vocabulary_size)
    for start in range(0, len(tokens), step):
        checkpoint()
        here = slice(start, start + step)
        drawn = Drawn(key, row_index[here], positions[here])
        logits = engine.logits(states[here])
        found = margins(logits, tokens[here], temperature, drawn, scored=scored)
        parts.append(torch.stack([found.margin, found.gap, found.log_probability]))
    capped = torch.cat(parts, dim=1).clamp(-MARGIN_CAP, MARGIN_CAP)
    return capped.cpu().numpy().astype(np.float64)


def proof_figures(results: Sequence[toploc.ChunkResult]) -> ProofFigures:
    count = len(results)
    return ProofFigures(
        chunks=count,
        chunks_passed=sum(result.accepted for result in results),
        error_mean=sum(result.error for result in results) / count,
    )


def sampling_figures(margins: npt.NDArray[np.float64]) -> SamplingFigures:
    """The figures of all tokens of a submission."""
    return SamplingFigures(
        tokens=len(margins),
        mismatches=int((margins > 0).sum()),
        margin_mean=float(np.minimum(margins, 1.0).mean()) if len(margins) else 0.0,
        margin_max=float(margins.max(initial=0.0)),
    )
