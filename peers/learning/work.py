"""A step's useful work, and figures of each environment in which a collapse shows first."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from peers.learning.batch import AcceptedGroups, Batch
from peers.learning.packing import distinct
from peers.learning.ranks import Ranks
from swarm.wire.messages import ENVIRONMENTS_MAX

GRAM = 4
"""Tokens of a run whose return is a repetition (seq-rep-4 of Welleck et al., arXiv 1908.04319)."""

_SHARES = {
    "completion_length": (1, 0),
    "truncated": (2, 0),
    "repetition": (4, 3),
    "entropy": (6, 5),
    "kl_generation": (7, 5),
}
"""The sums that each figure is a quotient of."""


NO_WORK = {"trained_tokens": 0.0, "model_flops": 0.0}
"""The work of a step that trained on nothing."""


def training_work(model: Any, batch: Batch) -> dict[str, float]:
    """Figures of one optimiser step on this rank's sequences, which add up over ranks and steps.

    `trained_tokens`: prompt and completion tokens. `model_flops`: the operations that they need.
    Equal sequences of a batch are computed once (`packing.py`), so they count once here."""
    sequences = [(each.inputs, len(each.sampled)) for each in distinct(batch)]
    return {
        "trained_tokens": float(batch.lengths.sum()),
        "model_flops": model_flops(model, sequences),
    }


def model_flops(model: Any, sequences: Sequence[tuple[int, int]]) -> float:
    """Floating-point operations to train on sequences, forward and backward.

    `sequences`: (inputs, sampled tokens) of each. Per input 6 per parameter of the layers, and
    causal attention's 6 · layers · width · inputs (Chowdhery et al. 2022, 2204.02311, appendix B,
    halved for causality); per sampled token 6 per parameter of the head, which computes no others.
    Frozen parameters, which get no gradient, take 4 instead of 6.
    The embedding is a look-up. Of a layer's experts, those that a token is routed to count. Work
    that is done twice (activation checkpointing) and the passes for log μ are not counted."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    experts = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
    share = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
    body = sum(
        _operations(parameter) * (share if ".experts." in name else 1.0)
        for name, parameter in model.get_decoder().named_parameters()
        if parameter is not head and parameter is not embedding
    )
    heads = getattr(config, "num_attention_heads", 0) or 1
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    inputs = sum(count for count, _ in sequences)
    attention = 6.0 * config.num_hidden_layers * width * sum(count**2 for count, _ in sequences)
    sampled = sum(count for _, count in sequences)
    return float(body * inputs + _operations(head) * sampled + attention)


def _operations(parameter: Tensor) -> int:
    """Operations per input that a parameter takes part in, forward and backward."""
    return parameter.numel() * (6 if parameter.requires_grad else 4)


def by_environment(environment: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Sums of columns [n] over each environment, fp64 [environments, columns]."""
    values = torch.stack([each.detach().double() for each in columns], 1)
    return values.new_zeros(ENVIRONMENTS_MAX, len(columns)).index_add_(0, environment, values)


def stability(
    given: Sequence[AcceptedGroups], trained: Sequence[Tensor], ranks: Ranks
) -> list[dict[str, float]]:
    """Figures of each environment by index, and last those of all; unknown ones are left out.

    `trained`: sums over passes of this rank, fp64 [environments, 3]: tokens, their entropies and
    KLs to the sampler. Repetition is of the completions trained on, length and truncation of all.
    """
    sums = torch.zeros(ENVIRONMENTS_MAX, 8, dtype=torch.float64)
    for each in trained:
        sums[:, 5:] += each.cpu()
    for some in given:
        length = some.all_completion_lengths * (ranks.rank == 0)  # which every rank knows
        columns = (length.bool(), length, length.bool() & some.truncated)
        sums[:, :3] += by_environment(some.environment, columns)
        sums[:, 3:5] += by_environment(some.environment[some.rows], _runs(some))
    sums = torch.tensor(ranks.sum(sums.flatten().tolist())).view_as(sums)
    return [
        {name: row[a] / row[b] for name, (a, b) in _SHARES.items() if row[b] and isfinite(row[a])}
        for row in [*sums.tolist(), sums.sum(0).tolist()]
    ]


def _runs(given: AcceptedGroups) -> Sequence[Tensor]:
    """Runs of `GRAM` tokens in each of this rank's completions, and those seen in it before."""
    lengths = given.all_completion_lengths[given.rows].tolist()
    found = []
    for tokens in map(Tensor.tolist, given.tokens[given.sampled].split(lengths)):  # type: ignore[no-untyped-call]
        runs = list(zip(*(tokens[start:] for start in range(GRAM)), strict=False))
        found.append((len(runs), len(runs) - len(set(runs))))
    return torch.tensor(found).view(-1, 2).unbind(1)
