"""Memory of a forward and backward pass, counted on fake tensors, which hold no data."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from peers.engines.architecture import is_described
from peers.engines.loading import decoder_layers
from peers.learning.live import LiveMemory
from peers.learning.packing import Rows
from peers.learning.scorer import LOGITS_MAX, Scorer
from peers.learning.sharding import recompute

LAYERS_RUN = 3
"""Layers of a deeper model that are run; memory grows by the same amount with each further one."""

FUSED = "fused-causal"
"""Name under which transformers finds its own sdpa without making a mask, which it would of fake
tensors, as if a compiler gave them: causal attention by a fused kernel, as on GPUs."""


class Activations(NamedTuple):
    """Bytes of one pass, without parameters, their gradients and copies."""

    training: int
    """Most at once in a pass with gradients, logits included."""
    scoring: int
    """Most at once in a pass without."""


@dataclass(frozen=True)
class Pass:
    """A pass whose memory is asked for."""

    tokens: int
    """In one row; all but the first are completion tokens."""
    dtype: torch.dtype
    checkpointing: bool
    device: str
    """`cuda` or `cpu`: they take different numbers of logits at a time."""
    attention: str = FUSED
    """An attention implementation: `eager` keeps all scores, `FUSED` what fused kernels keep."""


def activations(model: Any, asked: Pass) -> Activations:
    """Count a pass's memory (`model`: blank, spent), or estimate it of a family not described."""
    return _count(model, asked) if is_described(model.config.to_dict()) else _estimate(model, asked)


def _estimate(model: Any, asked: Pass) -> Activations:
    """17 values per token, layer and hidden unit, without attention's scores (2205.05198, §4.1)."""
    config = model.config.get_text_config()
    unit = asked.tokens * config.hidden_size * asked.dtype.itemsize
    logits = 3 * 4 * min(asked.tokens * config.vocab_size, LOGITS_MAX[asked.device])
    layer = 17 * unit
    deep = config.num_hidden_layers
    kept = (layer + deep * unit) if asked.checkpointing else deep * layer
    return Activations(kept + logits, layer + logits)


def _count(model: Any, asked: Pass) -> Activations:
    if asked.dtype == torch.float32 and hasattr(model.config, "num_experts"):
        # The kernel for experts cannot be counted in fp32, which takes twice the memory.
        half = _count(model, replace(asked, dtype=torch.bfloat16))
        return Activations(2 * half.training, 2 * half.scoring)
    AttentionInterface.register(FUSED, sdpa_attention_forward)
    model.set_attn_implementation("eager")  # which scores every model
    scorer = Scorer(model)
    model.set_attn_implementation(asked.attention)
    scorer.logits_max = LOGITS_MAX[asked.device]
    layers = decoder_layers(model)
    every = list(layers)
    deep = len(every) > LAYERS_RUN
    found: list[Activations] = []
    for count in (LAYERS_RUN - 1, LAYERS_RUN) if deep else (len(every),):
        del layers[:]
        layers.extend(every[:count])
        model.config.num_hidden_layers = count
        found.append(_run(scorer, layers, asked))
    more, (less, most) = max(0, len(every) - LAYERS_RUN), (found[0], found[-1])
    return Activations(*(high + more * (high - low) for low, high in zip(less, most, strict=True)))


def _run(scorer: Scorer, layers: torch.nn.ModuleList, asked: Pass) -> Activations:
    model = scorer.model
    forwards: dict[Any, Any] = {layer: layer.forward for layer in layers}
    if asked.checkpointing:
        for layer in forwards:
            recompute(layer)
    # A GPU multiplies 16-bit numbers into fp32 logits; a CPU copies the head to fp32 for it.
    half_on_gpu = asked.device == "cuda" and asked.dtype != torch.float32
    ignored = model.get_output_embeddings().weight.numel() * 4 if half_on_gpu else -1
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fake(model, asked.dtype)
        flat = torch.zeros(asked.tokens, dtype=torch.int64)
        row = torch.zeros(1, asked.tokens, dtype=torch.int64)
        rows = Rows(row, row, row, False, flat, flat, flat, flat, flat)
        known = [*model.parameters(), *model.buffers(), flat, row]
        with LiveMemory(known, ignored) as live:
            log_pi, entropy = scorer(rows, entropy_gradient=True)
            (log_pi.sum() + entropy.sum()).backward()
        del log_pi, entropy
        with LiveMemory(known, ignored) as alone, torch.no_grad():
            scorer(rows, entropy=False)
    for layer, forward in forwards.items():
        layer.forward = forward
    return Activations(live.peak, alone.peak)


def _fake(model: Any, dtype: torch.dtype) -> None:
    """Replace parameters and buffers by fake tensors; gradients are dropped as they appear."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=dtype)
                fake: Any = torch.nn.Parameter(empty, parameter.requires_grad)
                if parameter.requires_grad:
                    fake.register_post_accumulate_grad_hook(_drop)
                made[id(parameter)] = made[id(fake)] = fake
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None
