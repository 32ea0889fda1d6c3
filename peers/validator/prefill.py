"""The statistical checks of a submission, in a child process with the policy's weights.

One batched prefill recomputes hidden states and logits. The proofs must fit the hidden states, and
every token must be the argmax of logits plus the seed's noise. Both checks are statistical, because
rounding differs between machines. They refuse a submission; a worker is evicted only when honest
chance cannot explain its record.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from peers.engines.device import use_hardware
from peers.engines.engine import Engine, Prefill
from peers.engines.registry import check_engine, make_engine
from peers.engines.sampling import gumbel_noise, judge_margins
from peers.proofs import toploc
from peers.proofs.format import split
from peers.validator.checks.base import run_all
from peers.validator.checks.policy import CHECKS, Recomputation
from swarm.jobs import Load, validation
from swarm.jobs.validation import (
    Judge,
    Judged,
    PoliciesLoaded,
    PrefillSetup,
    ProofFigures,
    SamplingFigures,
)
from swarm.messages import CheckpointReference, Thresholds
from swarm.rollouts.rollouts import Rollouts, check_digest
from swarm.rollouts.seeds import noise_key
from swarm.world.job_thread import JobThread, in_job_thread
from swarm.world.progress import checkpoint

CERTAIN = 0.99
"""Probability of the likeliest token from which on a token carries no evidence: a wrong policy
would sample it too."""

MARGIN_CAP = 1e6
"""Largest margin reported. A token with noise −∞, which cannot be sampled, has an infinite
margin, but figures must be finite."""

ENTRIES_MAX = 1 << 22
"""Token positions × vocabulary judged at once: logits and noise take about 60 bytes per entry."""

PREFILL_TOKENS_MAX = 1 << 15
"""Tokens whose hidden states are held at once. Each takes about 20 KB at a width of 5120, and a
submission of long rollouts has millions."""


class PrefillService:
    """Implements `swarm.jobs.validation.PrefillService`.

    Keeps the weights of the last policies used, because submissions of the current and the previous
    policy alternate; older policies are rare.
    """

    def __init__(self, setup: PrefillSetup) -> None:
        """Check engine and device; raises `UserError` if this machine lacks one of them."""
        check_engine(setup.engine)
        use_hardware(setup.hardware)
        self._setup = setup
        self._thread = JobThread()
        self._engines: OrderedDict[CheckpointReference, Engine] = OrderedDict()
        # Build the tables of TOPLOC now, not during the first submission.
        warm = [torch.randn(2, 128).bfloat16()]
        toploc.verify(warm, toploc.build(warm))

    @in_job_thread
    def load(self, job: Load) -> PoliciesLoaded:
        self._engines.pop(job.policy, None)
        while len(self._engines) >= self._setup.policies_kept:  # free memory before loading
            self._engines.popitem(last=False)
        self._engines[job.policy] = make_engine(
            self._setup.engine, Path(job.folder), self._setup.hardware
        )
        return PoliciesLoaded(policies=list(self._engines))

    @in_job_thread
    @torch.inference_mode()
    def judge(self, job: Judge) -> Judged:
        policy = job.order.policy
        if policy not in self._engines:
            raise ValueError(f"{policy} is not loaded; there are: {list(self._engines)}")
        self._engines.move_to_end(policy)
        raw = Path(job.path).read_bytes()
        check_digest(raw, job.digest)
        rollouts = Rollouts.from_bytes(raw)
        engine = self._engines[policy]
        chunks: list[toploc.ChunkResult] = []
        margins: list[Margins] = []
        for rows in _batches(rollouts, range(len(rollouts)) if job.rows is None else job.rows):
            judged = [rollouts.rollout(row) for row in rows]
            prefill = engine.prefill(
                [rollout.tokens for rollout in judged], [rollout.sampled for rollout in judged]
            )
            proofs = [rollouts.proof(row) for row in rows]
            chunks += _judge_proofs(prefill, proofs, job.thresholds)
            completions = [rollout.model_tokens for rollout in judged]
            temperature = job.order.sampling.temperature
            margins.append(
                judge_sampling(engine, prefill, completions, rows, job.order.seed(), temperature)
            )
        found = Recomputation(
            proofs=_proof_figures(chunks),
            sampling=sampling_figures(margins),
            thresholds=job.thresholds,
        )
        report = run_all(CHECKS, found)
        return Judged(
            **msgspec.structs.asdict(report), proofs=found.proofs, sampling=found.sampling
        )


_SERVICE: type[validation.PrefillService] = PrefillService


def _batches(rollouts: Rollouts, rows: Sequence[int]) -> Iterator[list[int]]:
    """Cut rows into runs of at most `PREFILL_TOKENS_MAX` tokens, or of one row."""
    lengths = np.diff(rollouts.token_offsets).tolist()
    batch: list[int] = []
    tokens = 0
    for row in rows:
        if batch and tokens + lengths[row] > PREFILL_TOKENS_MAX:
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += lengths[row]
    yield batch


def _judge_proofs(
    prefill: Prefill, proofs: Sequence[bytes], thresholds: Thresholds
) -> list[toploc.ChunkResult]:
    chunks = [
        chunk
        for before, hidden in zip(prefill.prompt_hidden, prefill.hidden, strict=True)
        for chunk in toploc.chunk_rows(before, hidden)
    ]
    return toploc.verify(chunks, [part for proof in proofs for part in split(proof)], thresholds)


def _proof_figures(results: Sequence[toploc.ChunkResult]) -> ProofFigures:
    count = len(results)
    return ProofFigures(
        chunks=count,
        chunks_passed=sum(result.accepted for result in results),
        exponents_min=min(result.exponent_matches for result in results),
        exponents_mean=sum(result.exponent_matches for result in results) / count,
        mantissa_mean_max=max(result.mantissa_mean for result in results),
    )


class Margins(NamedTuple):
    """How well sampled tokens agree with the recomputed logits."""

    margin: Tensor
    """[tokens]: see `peers.engines.sampling.Judgement`."""
    certain: Tensor
    """[tokens]: whether the likeliest token has at least the probability `CERTAIN`."""


@torch.inference_mode()
def judge_sampling(
    engine: Engine,
    prefill: Prefill,
    completions: Sequence[Sequence[int]],
    rows: Sequence[int],
    seed: bytes,
    temperature: float,
    entries_max: int = ENTRIES_MAX,
) -> Margins:
    """Compare the tokens with recomputed logits plus the seed's noise, `entries_max` at a time.

    Every token is judged, so both a stop token and its absence are: stop ids compete like others.
    """
    margins, certain = [], []
    key = noise_key(seed)
    states = torch.cat(prefill.states)  # [n, hidden], all completions end to end
    device = states.device
    tokens = torch.tensor([token for row in completions for token in row], device=device)
    lengths = torch.tensor([len(completion) for completion in completions], device=device)
    row_index = torch.tensor(list(rows), device=device).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(len(row), device=device) for row in completions])
    step = max(1, entries_max // engine.vocabulary_size)
    for start in range(0, len(tokens), step):
        checkpoint()
        here = slice(start, start + step)
        noise = gumbel_noise(key, row_index[here], positions[here], engine.vocabulary_size)
        logits = engine.logits(states[here])
        judgement = judge_margins(logits, tokens[here], temperature, noise)
        margins.append(judgement.margin)
        certain.append(judgement.p_max >= CERTAIN)
    return Margins(torch.cat(margins), torch.cat(certain))


def sampling_figures(judged: Sequence[Margins]) -> SamplingFigures:
    """The figures of several batches of tokens."""
    margin = torch.cat([each.margin for each in judged])
    open_positions = ~torch.cat([each.certain for each in judged])
    pooled = margin[open_positions]
    return SamplingFigures(
        tokens=len(margin),
        positions=len(pooled),
        mismatches=int((pooled > 0).sum()),
        margin_mean=float(pooled.clamp(max=1).mean()) if len(pooled) else 0.0,
        margin_max=float(margin.max().clamp(max=MARGIN_CAP)),
    )
