"""Policies with the shapes of published models and random weights, for benchmarks on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

MODELS: dict[str, dict[str, int]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
"""Shapes, from the config.json of Qwen/Qwen2.5-0.5B and Qwen/Qwen2.5-1.5B; tiny is for trials."""


def make_policy(name: str, device: str, half: bool, folder: Path) -> None:
    """Write a Hugging Face folder with random weights, in bf16 or fp32."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    with torch.device(device):
        model = new_model(name)
    model.to(torch.bfloat16 if half else torch.float32).save_pretrained(folder)


def new_model(name: str) -> Any:
    """One of `MODELS`, with random weights, on torch's default device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config: Any = Qwen2Config(
        **MODELS[name],
        max_position_embeddings=32_768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)
