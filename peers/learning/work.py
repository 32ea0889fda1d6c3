"""The useful work of a step: the tokens that it trained on, and the operations that they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from peers.learning.batch import Batch

NO_WORK = {"trained_tokens": 0.0, "model_flops": 0.0}
"""The work of a step that trained on nothing."""


def training_work(model: Any, batch: Batch) -> dict[str, float]:
    """Figures of one optimiser step on this rank's sequences, which add up over ranks and steps.

    `trained_tokens`: prompt and completion tokens. `model_flops`: the operations that they need.
    Equal sequences of a batch are computed once (`packing.py`), so they count once here.
    """
    columns = zip(
        batch.split(batch.tokens),
        batch.split(batch.sampled),
        batch.temperature.tolist(),
        batch.completion_lengths.tolist(),
        strict=True,
    )
    distinct = {
        (temperature, tokens.numpy().tobytes(), mask.numpy().tobytes()): (len(tokens) - 1, sampled)
        for tokens, mask, temperature, sampled in columns
    }
    return {
        "trained_tokens": float(batch.lengths.sum()),
        "model_flops": model_flops(model, list(distinct.values())),
    }


def model_flops(model: Any, sequences: Sequence[tuple[int, int]]) -> float:
    """Floating-point operations to train on sequences, forward and backward.

    `sequences`: (inputs, sampled tokens) of each. Per input 6 per parameter of the layers, and
    causal attention's 6 · layers · width · inputs (Chowdhery et al. 2022, 2204.02311, appendix B,
    halved for causality); per sampled token 6 per parameter of the head, which computes no others.
    Frozen parameters, which get no gradient, take 4 instead of 6.
    The embedding is a look-up. Of a layer's experts, those that a token is routed to count. Work
    that is done twice (activation checkpointing) and the passes for log μ are not counted.
    """
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
