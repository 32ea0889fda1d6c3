"""The model's mathematics: weights from a folder, layers, final norm, logits.

No framework lies between the weights and the matrix products. Caches, batches and masks are the
caller's: `forward` hands each layer's queries, keys and values to a function that attends. What
differs between families is in the `Architecture` that the config asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.engines.attention import LayerAttention
from peers.engines.config import read_architecture
from peers.engines.feedforward import Dense, Mixture
from peers.engines.logits import adjust_logits
from peers.engines.model import read_weights
from peers.engines.rotary import make_rotary, turn
from peers.engines.weights import Weights
from swarm.errors import UserError

Attention = Callable[[LayerAttention, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, H, S, D], keys and values [B, H_kv, S, D]) → [B, H, S, D]."""


@dataclass
class _Layer:
    """One decoder layer's weights. Queries, keys and values come from one matrix product."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    outer_attention_norm: Tensor | None
    mlp_norm: Tensor
    mlp: Dense | Mixture
    outer_mlp_norm: Tensor | None


class Decoder:
    """A policy without caches. Computes in the stored dtype, logits in fp32."""

    def __init__(
        self, folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        """Load the policy in `folder`; raises `UserError` for an unsupported model.

        `dtype` is the precision to compute in; None: the weights' stored dtype.
        """
        self.model = model = read_architecture(folder)
        self.device = torch.device(device)
        self._dtype = dtype
        self.vocabulary_size = model.vocabulary_size
        self.hidden_size = model.hidden_size
        self.length_max = model.length_max
        self.heads, self.kv_heads, self.head_size = model.heads, model.kv_heads, model.head_size
        self.layers = [
            LayerAttention(index, model.query_scale, layer.window, model.attention_cap)
            for index, layer in enumerate(model.layers)
        ]
        self._assign(read_weights(folder), folder)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states, keys and values."""
        return self._embedding.dtype

    def load_weights(self, folder: Path) -> None:
        """Replace the weights by those of another checkpoint of the same model.

        Raises `UserError` when they do not fit, and then keeps the old weights.
        """
        model = read_architecture(folder)
        if model != self.model:
            changed = [
                name for name, value in vars(model).items() if value != vars(self.model)[name]
            ]
            raise UserError(
                f"{folder} holds another model than the one loaded: {changed[0]} differs"
            )
        self._assign(read_weights(folder), folder)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """fp32 logits [..., vocabulary] of hidden states, before the temperature."""
        return adjust_logits(self.model, F.linear(states.float(), self._head))

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Layers and final norm: tokens [B, S], positions [S] or [B, S] → [B, S, hidden]."""
        length = int(positions.max()) + 1
        turns = {kind: rotary.at(positions, length) for kind, rotary in self._rotary.items()}
        stream = F.embedding(tokens, self._embedding)
        if self._embedding_scale != 1:
            stream = stream * self._embedding_scale
        for info, layer in zip(self.layers, self._layers, strict=True):
            inner = self._norm(stream, layer.input_norm)
            cos, sin = turns[self.model.layers[info.index].kind]
            mixed = self._attend(info, layer, inner, cos, sin, attention)
            stream = self._add(stream, mixed, layer.outer_attention_norm)
            mixed = layer.mlp(self._norm(stream, layer.mlp_norm))
            stream = self._add(stream, mixed, layer.outer_mlp_norm)
        return self._norm(stream, self._final_norm)

    def _attend(
        self,
        info: LayerAttention,
        layer: _Layer,
        inner: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: Attention,
    ) -> Tensor:
        batch, length, _ = inner.shape
        turned = self.heads + self.kv_heads
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
        query_key = turn(query_key, cos, sin).transpose(1, 2)
        mixed = attention(
            info,
            query_key[:, : self.heads],
            query_key[:, self.heads :],
            value.transpose(1, 2),
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        return F.linear(mixed, layer.output, layer.output_bias)

    def _add(self, stream: Tensor, mixed: Tensor, outer_norm: Tensor | None) -> Tensor:
        """The stream, in place, plus what a layer's attention or MLP computed."""
        if outer_norm is not None:
            mixed = self._norm(mixed, outer_norm)
        if self.model.residual_scale != 1:
            mixed = mixed * self.model.residual_scale
        stream += mixed
        return stream

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        # Takes half the time of F.rms_norm on a CPU, and rounds where transformers rounds.
        exact = values.float()
        scale = torch.rsqrt((exact * exact).mean(-1, keepdim=True) + self.model.epsilon)
        if self.model.norm_adds_one:  # the weight is fp32
            return (exact * scale * weight).to(values.dtype)
        return (exact * scale).to(values.dtype) * weight

    def _assign(self, stored: dict[str, Tensor], folder: Path) -> None:
        """Use these weights; nothing changes when a weight is missing or has the wrong shape."""
        model = self.model
        weights = Weights(model, stored, folder, self.device, self._dtype)
        layers = [_read_layer(weights, index) for index in range(len(model.layers))]
        embedding = weights.take(
            "model.embed_tokens.weight", model.vocabulary_size, model.hidden_size
        )
        head = embedding
        if not model.tied:
            head = weights.take("lm_head.weight", model.vocabulary_size, model.hidden_size)
        final_norm = weights.norm("model.norm.weight", model.hidden_size)
        weights.check_all_taken()
        self._layers, self._embedding, self._final_norm = layers, embedding, final_norm
        self._head = head.float()
        scale = model.embedding_scale
        if model.rounds_embedding_scale:
            scale = float(torch.tensor(scale, dtype=embedding.dtype))
        self._embedding_scale = scale
        self._rotary = make_rotary(model, folder, self.device, self.dtype)


def _read_layer(weights: Weights, index: int) -> _Layer:
    model = weights.model
    at, hidden = f"model.layers.{index}.", model.hidden_size
    sizes = {
        "q": model.heads * model.head_size,
        "k": model.kv_heads * model.head_size,
        "v": model.kv_heads * model.head_size,
    }
    projection = {name: f"{at}self_attn.{name}_proj" for name in sizes}

    def norm(name: str, size: int, wanted: bool) -> Tensor | None:
        return weights.norm(f"{at}{name}.weight", size) if wanted else None

    before_mlp = "pre_feedforward_layernorm" if model.outer_norms else "post_attention_layernorm"
    return _Layer(
        input_norm=weights.norm(f"{at}input_layernorm.weight", hidden),
        qkv=torch.cat(
            [weights.take(f"{projection[n]}.weight", size, hidden) for n, size in sizes.items()]
        ),
        qkv_bias=torch.cat(
            [weights.take(f"{projection[n]}.bias", size) for n, size in sizes.items()]
        )
        if model.query_bias
        else None,
        query_norm=norm("self_attn.q_norm", model.head_size, model.head_norms),
        key_norm=norm("self_attn.k_norm", model.head_size, model.head_norms),
        output=weights.take(f"{at}self_attn.o_proj.weight", hidden, sizes["q"]),
        output_bias=weights.take(f"{at}self_attn.o_proj.bias", hidden)
        if model.output_bias
        else None,
        outer_attention_norm=norm("post_attention_layernorm", hidden, model.outer_norms),
        mlp_norm=weights.norm(f"{at}{before_mlp}.weight", hidden),
        mlp=weights.mlp(f"{at}mlp.", index),
        outer_mlp_norm=norm("post_feedforward_layernorm", hidden, model.outer_norms),
    )
