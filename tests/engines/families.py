"""Tiny models of every family of the native engine, all weights random, and their references."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
WINDOW = 5
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
SUPPORTED: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama-tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-rope": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-linear": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama-yarn": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    ),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2-tied": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-window": transformers.Qwen2Config(**SIZES, **WINDOWS, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3-window": transformers.Qwen3Config(
        **SIZES, **WINDOWS, max_window_layers=2, head_dim=8, tie_word_embeddings=True
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3-moe-window": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, **WINDOWS, head_dim=16),
}
"""By a name of the test."""


def save_random(config: Any, folder: Path, seed: int, scale: float = 0.3) -> Any:
    """A model whose every weight is random (biases and norms too), so that none goes untested."""
    reference = transformers.AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0, scale, generator=generator)
    reference.set_attn_implementation("eager")
    reference.save_pretrained(folder)
    return reference.eval()


def log_probabilities(reference: Any, tokens: list[int]) -> Tensor:
    """log softmax of the logits that predict each token but the first, [n − 1, vocabulary]."""
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits, -1)
