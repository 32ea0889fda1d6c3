"""A tiny deep model with a large vocabulary, scaled as trained models are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from peers.engines import demo
from peers.engines.model import save

LOGIT_DEVIATION = 4.0
"""Standard deviation of the logits: that of a trained model's by order of magnitude."""


def make_deep_model(
    folder: Path, *, layers: int, vocabulary: int, width: int = 64, positions: int = 256
) -> Path:
    """Write a random Qwen2 in bf16 with the demo's tokenizer, filled up to `vocabulary` tokens.

    Every matrix keeps the variance of its input, so the residual stream grows with depth.
    """
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=demo.BOS_ID,
        eos_token_id=demo.EOS_ID,
        pad_token_id=0,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(layers)
        model = Qwen2ForCausalLM(config)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                deviation = 1.0 if "embed" in name else 1 / math.sqrt(weight.shape[1])
                weight.normal_(0, deviation * (LOGIT_DEVIATION if "lm_head" in name else 1))
    demo.save_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    known.update({f"<t{number}>": number for number in range(len(known), vocabulary)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    save(model.bfloat16(), folder, tokenizer_from=folder)
    return folder
