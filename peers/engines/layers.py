"""A range of a model's layers on one device, with causal attention and rotary embedding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.engines.adapter import Adapter
from peers.engines.architecture import Architecture
from peers.engines.projection import Dense, Mixture, Projection
from peers.engines.weights import Weights

BLOCK = 512
"""Queries in one piece where no fused kernel computes the layer: bounds the scores in memory."""


@dataclass(frozen=True)
class LayerAttention:
    """What the function that attends must know about a layer."""

    index: int
    window: int | None = None
    """A token attends to this many tokens, itself included; None: to all before it."""


def unseen(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Whether a query may not attend to a key, bool, for positions that broadcast together."""
    later = key > query
    return later if window is None else later | (key <= query - window)


def attend_causally(layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every token attends to itself and those before it, within the layer's window."""
    length, window = query.shape[2], layer.window
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attend_further(layer, query, key, value, 0)


def attend_further(
    layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor, past: int
) -> Tensor:
    """Causal attention of queries [B, H, S, D] to keys and values [B, H_kv, `past` + S, D]."""
    length, window = query.shape[2], layer.window
    positions = torch.arange(past + length, device=query.device)
    pieces = []
    for start in range(0, length, BLOCK):
        rows = slice(start, min(start + BLOCK, length))
        first = 0 if window is None else max(0, past + start - window + 1)
        seen = slice(first, past + rows.stop)
        blocked = unseen(positions[past + start : seen.stop, None], positions[seen], window)
        given = (query[:, :, rows], key[:, :, seen], value[:, :, seen])
        pieces.append(F.scaled_dot_product_attention(*given, attn_mask=~blocked, enable_gqa=True))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


class Rotary:
    """The tables on one device; they grow with the positions used."""

    def __init__(self, frequencies: Tensor, scale: float, dtype: torch.dtype) -> None:
        """`frequencies`: angle per position for each pair of dimensions; `scale` of both tables."""
        self._frequencies = frequencies
        self._scale = scale
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0, 2 * len(frequencies))

    def at(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """(cosines, signed sines) of `positions`, all below `length`: [..., 1, head size]."""
        if length > len(self._cos):
            self._extend(max(length, 2 * len(self._cos)))
        return self._cos[positions].unsqueeze(-2), self._sin[positions].unsqueeze(-2)

    def _extend(self, length: int) -> None:
        positions = torch.arange(length, device=self._frequencies.device).float()
        angles = torch.outer(positions, self._frequencies).repeat(1, 2)
        self._cos = (angles.cos() * self._scale).to(self._dtype)
        self._sin = (angles.sin() * self._scale).to(self._dtype)
        self._sin[:, : len(self._frequencies)].neg_()  # the sign of "rotate half", applied once


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [..., heads, head size] by `Rotary.at`."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return torch.addcmul(heads * cos, swapped, sin)


def make_rotary(
    model: Architecture, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> Rotary:
    """The rotary embedding of a model, whose config is `config`."""
    if model.rope["rope_type"] == "default":
        exponents = torch.arange(0, model.head_size, 2, dtype=torch.float32) / model.head_size
        return Rotary((1.0 / model.rope["rope_theta"] ** exponents).to(device), 1.0, dtype)
    from transformers import CONFIG_MAPPING
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    loaded = CONFIG_MAPPING[model.family].from_dict(dict(config))
    frequencies, scale = ROPE_INIT_FUNCTIONS[model.rope["rope_type"]](loaded, device)
    return Rotary(frequencies, float(scale), dtype)


Attention = Callable[[LayerAttention, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, H, S, D], keys and values [B, H_kv, S, D]) → [B, H, S, D]."""


@dataclass
class _Layer:
    """One decoder layer's weights. Queries, keys and values come from one matrix product."""

    input_norm: Tensor
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    mlp_norm: Tensor
    mlp: Dense | Mixture


def rms_norm(model: Architecture, values: Tensor, weight: Tensor) -> Tensor:
    """Normalise the last dimension as the model does."""
    # Takes half the time of F.rms_norm on a CPU, and rounds where transformers rounds.
    exact = values.float()
    scale = torch.rsqrt((exact * exact).mean(-1, keepdim=True) + model.epsilon)
    return (exact * scale).to(values.dtype) * weight


class Layers:
    """The layers of a range, ready to compute."""

    def __init__(self, weights: Weights, span: range, rotary: Rotary | None) -> None:
        """Raises `UserError` for wrong weights. `rotary`: None if nothing is to be computed."""
        self._model, self.device = weights.model, weights.device
        self._infos = [LayerAttention(index, weights.model.windows[index]) for index in span]
        self._layers = [_read_layer(weights, index) for index in span]
        self._rotary = rotary

    def adapt(self, adapter: Adapter | None) -> None:
        """Put an adapter beside the matrices, unmerged, instead of the one before."""
        for layer in self._layers:
            layer.qkv.adapt(adapter)
            layer.output.adapt(adapter)
            if isinstance(layer.mlp, Dense):
                layer.mlp.gate_up.adapt(adapter)
                layer.mlp.down.adapt(adapter)

    @torch.no_grad()
    def replace(self, weights: Weights) -> None:
        """Take other weights of the same shapes, layer by layer."""
        for at, info in enumerate(self._infos):
            self._layers[at] = _read_layer(weights, info.index)

    def __call__(
        self, stream: Tensor, positions: Tensor, attention: Attention, length: int
    ) -> Tensor:
        """The stream [B, S, hidden] after the layers, changed in place.

        Positions [S] or [B, S] are below `length`: to ask them would wait for the device."""
        assert self._rotary is not None
        cos, sin = self._rotary.at(positions, length)
        for info, layer in zip(self._infos, self._layers, strict=True):
            inner = rms_norm(self._model, stream, layer.input_norm)
            stream += self._attend(info, layer, inner, cos, sin, attention)
            stream += layer.mlp(rms_norm(self._model, stream, layer.mlp_norm))
        return stream

    def _attend(
        self,
        info: LayerAttention,
        layer: _Layer,
        inner: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: Attention,
    ) -> Tensor:
        model = self._model
        batch, length, _ = inner.shape
        turned = model.heads + model.kv_heads
        heads = layer.qkv(inner).view(batch, length, turned + model.kv_heads, model.head_size)
        query_key, value = heads[:, :, :turned], heads[:, :, turned:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query_key = torch.cat(
                (
                    rms_norm(model, query_key[:, :, : model.heads], layer.query_norm),
                    rms_norm(model, query_key[:, :, model.heads :], layer.key_norm),
                ),
                dim=2,
            )
        query_key = turn(query_key, cos, sin).transpose(1, 2)
        mixed = attention(
            info, query_key[:, : model.heads], query_key[:, model.heads :], value.transpose(1, 2)
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        return layer.output(mixed)


def _read_layer(weights: Weights, index: int) -> _Layer:
    model = weights.model
    at, hidden = f"model.layers.{index}.", model.hidden_size
    sizes = {
        "q": model.heads * model.head_size,
        "k": model.kv_heads * model.head_size,
        "v": model.kv_heads * model.head_size,
    }
    qkv = {f"{at}self_attn.{name}_proj": size for name, size in sizes.items()}
    output = {f"{at}self_attn.o_proj": hidden}

    def head_norm(name: str) -> Tensor | None:
        if not model.head_norms:
            return None
        return weights.take(f"{at}self_attn.{name}.weight", model.head_size)

    return _Layer(
        input_norm=weights.take(f"{at}input_layernorm.weight", hidden),
        qkv=weights.projection(qkv, hidden, bias=model.query_bias),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=weights.projection(output, sizes["q"]),
        mlp_norm=weights.take(f"{at}post_attention_layernorm.weight", hidden),
        mlp=weights.mlp(f"{at}mlp."),
    )
