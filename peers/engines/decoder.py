"""The model's mathematics: weights from a folder, layers, final norm, logits.

No framework lies between the weights and the matrix products. Caches, batches and masks are the
caller's: `forward` hands each layer's queries, keys and values to a function that attends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.engines.config import read_supported_config, rope_parameters
from peers.engines.model import read_weights
from swarm.errors import UserError

FIXED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "rms_norm_eps",
)
"""Fields of the config that two checkpoints of one model share."""


@dataclass(frozen=True)
class LayerAttention:
    """What the function that attends must know about a layer."""

    index: int
    scale: float
    """The factor of query · key."""
    window: int | None = None
    """A token attends to this many tokens, itself included; None: to all before it."""
    soft_cap: float | None = None
    """c: a score s becomes c·tanh(s / c) before the mask; None: it stays s."""


Attention = Callable[[LayerAttention, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, H, S, D], keys and values [B, H_kv, S, D]) → [B, H, S, D]."""


@dataclass
class _Layer:
    """One decoder layer's weights.

    Queries, keys and values come from one matrix product, gate and up from another.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    """Only Qwen3 normalises each head's queries and keys."""
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """A policy without caches. Computes in the stored dtype, logits in fp32."""

    def __init__(
        self, folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        """Load the policy in `folder`; raises `UserError` for an unsupported model.

        `dtype` is the precision to compute in; None: the weights' stored dtype.
        """
        config = read_supported_config(folder)
        self._config = config
        self.device = torch.device(device)
        self._dtype = dtype
        self.vocabulary_size: int = config["vocab_size"]
        self.hidden_size: int = config["hidden_size"]
        self.length_max: int = config["max_position_embeddings"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.head_size: int = config.get("head_dim") or self.hidden_size // self.heads
        scale = self.head_size**-0.5
        self.layers = [LayerAttention(n, scale) for n in range(config["num_hidden_layers"])]
        self._epsilon: float = config["rms_norm_eps"]
        self._frequencies, self._rotary_scale = _rotary_frequencies(
            config, folder, self.head_size, self.device
        )
        self._cos = self._sin = torch.empty(0, self.head_size)
        self._assign(read_weights(folder), folder)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states, keys and values."""
        return self._embedding.dtype

    def load_weights(self, folder: Path) -> None:
        """Replace the weights by those of another checkpoint of the same model.

        Raises `UserError` when they do not fit, and then keeps the old weights.
        """
        config = read_supported_config(folder)
        changed = [name for name in FIXED if config.get(name) != self._config.get(name)]
        if changed:
            raise UserError(
                f"{folder} holds another model than the one loaded: {changed[0]} differs"
            )
        self._assign(read_weights(folder), folder)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """fp32 logits [..., vocabulary] of hidden states, before the temperature."""
        return F.linear(states.float(), self._head)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Layers and final norm: tokens [B, S], positions [S] or [B, S] → [B, S, hidden]."""
        batch, length = tokens.shape
        self._extend_rotary(int(positions.max()) + 1)
        cos, sin = (table[positions].unsqueeze(-2) for table in (self._cos, self._sin))
        turned = self.heads + self.kv_heads
        half = self.head_size // 2
        stream = F.embedding(tokens, self._embedding)
        for info, layer in zip(self.layers, self._layers, strict=True):
            inner = self._norm(stream, layer.input_norm)
            heads = F.linear(inner, layer.qkv, layer.qkv_bias).view(
                batch, length, turned + self.kv_heads, self.head_size
            )
            query_key, value = heads[:, :, :turned], heads[:, :, turned:]
            if layer.query_norm is not None and layer.key_norm is not None:
                query_key = torch.cat(
                    (
                        self._norm(query_key[:, :, : self.heads], layer.query_norm),
                        self._norm(query_key[:, :, self.heads :], layer.key_norm),
                    ),
                    dim=2,
                )
            swapped = torch.cat((query_key[..., half:], query_key[..., :half]), dim=-1)
            query_key = torch.addcmul(query_key * cos, swapped, sin).transpose(1, 2)
            mixed = attention(
                info,
                query_key[:, : self.heads],
                query_key[:, self.heads :],
                value.transpose(1, 2),
            )
            mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
            stream += F.linear(mixed, layer.output, layer.output_bias)
            gate, up = F.linear(self._norm(stream, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            stream += F.linear(F.silu(gate) * up, layer.down)
        return self._norm(stream, self._final_norm)

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        # Takes half the time of F.rms_norm on a CPU, and rounds where transformers rounds.
        exact = values.float()
        scale = torch.rsqrt((exact * exact).mean(-1, keepdim=True) + self._epsilon)
        return (exact * scale).to(values.dtype) * weight

    def _extend_rotary(self, length: int) -> None:
        if length <= len(self._cos):
            return
        positions = torch.arange(max(length, 2 * len(self._cos)), device=self.device).float()
        angles = torch.outer(positions, self._frequencies).repeat(1, 2)
        dtype = self._embedding.dtype
        self._cos = (angles.cos() * self._rotary_scale).to(dtype)
        self._sin = (angles.sin() * self._rotary_scale).to(dtype)
        self._sin[:, : self.head_size // 2].neg_()  # the sign of "rotate half", applied once

    def _assign(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Use these weights; nothing changes when a weight is missing or has the wrong shape."""
        config = self._config
        attention_size, kv_size = self.heads * self.head_size, self.kv_heads * self.head_size
        hidden, inner = self.hidden_size, config["intermediate_size"]

        def take(name: str, *shape: int) -> Tensor:
            if name not in weights:
                raise UserError(f"the weights in {folder} lack {name}")
            if weights[name].shape != shape:
                raise UserError(
                    f"{name} in {folder} has shape {list(weights[name].shape)}, not {list(shape)}"
                )
            return weights[name].to(self.device, self._dtype)

        def bias(name: str, size: int) -> Tensor | None:
            return take(name, size) if name in weights else None

        layers = []
        for index in range(len(self.layers)):
            at = f"model.layers.{index}."
            sizes = {"q": attention_size, "k": kv_size, "v": kv_size}
            projection = {name: f"{at}self_attn.{name}_proj" for name in sizes}
            biases = [bias(f"{projection[n]}.bias", size) for n, size in sizes.items()]
            present = [entry for entry in biases if entry is not None]
            layers.append(
                _Layer(
                    input_norm=take(f"{at}input_layernorm.weight", hidden),
                    qkv=torch.cat(
                        [take(f"{projection[n]}.weight", size, hidden) for n, size in sizes.items()]
                    ),
                    qkv_bias=torch.cat(present) if len(present) == 3 else None,
                    query_norm=bias(f"{at}self_attn.q_norm.weight", self.head_size),
                    key_norm=bias(f"{at}self_attn.k_norm.weight", self.head_size),
                    output=take(f"{at}self_attn.o_proj.weight", hidden, attention_size),
                    output_bias=bias(f"{at}self_attn.o_proj.bias", hidden),
                    mlp_norm=take(f"{at}post_attention_layernorm.weight", hidden),
                    gate_up=torch.cat(
                        [take(f"{at}mlp.{n}_proj.weight", inner, hidden) for n in ("gate", "up")]
                    ),
                    down=take(f"{at}mlp.down_proj.weight", hidden, inner),
                )
            )
        embedding = take("model.embed_tokens.weight", self.vocabulary_size, hidden)
        head = embedding
        if not config.get("tie_word_embeddings", False):
            head = take("lm_head.weight", self.vocabulary_size, hidden)
        final_norm = take("model.norm.weight", hidden)
        self._layers, self._embedding, self._final_norm = layers, embedding, final_norm
        self._head = head.float()


def _rotary_frequencies(
    config: dict[str, Any], folder: Path, head_size: int, device: torch.device
) -> tuple[Tensor, float]:
    """Angle per position for each pair of dimensions, and the scale of sine and cosine."""
    parameters = rope_parameters(config)
    kind = parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        return (1.0 / parameters["rope_theta"] ** exponents).to(device), 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    loaded = AutoConfig.from_pretrained(folder, local_files_only=True)
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](loaded, device)
    return frequencies, float(scale)
