"""The model's mathematics: weights from a folder, layers, final norm, logits.

No framework lies between the weights and the matrix products. Caches, batches and masks are the
caller's: `forward` hands each layer's queries, keys and values to a function that attends. What
differs between models is in the `Architecture` that the config asks for."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from peers.engines.adapter import Adapter
from peers.engines.adapter_config import base_of
from peers.engines.architecture import Unsupported, describe
from peers.engines.config import read_config
from peers.engines.embedding_and_head import EmbeddingAndHead
from peers.engines.fitting import check_same, check_shapes
from peers.engines.layers import Attention, Layers, make_rotary
from peers.engines.model import read_adapter, read_weights
from peers.engines.weights import Weights
from swarm.errors import UserError


class Decoder:
    """A policy without caches. Computes in the stored dtype, logits in fp32."""

    def __init__(
        self,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        merge: bool = True,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """Load the policy in `folder`; raises `UserError` for an unsupported model.

        `dtype` is the precision to compute in; None: the weights' stored dtype. Unless `merge`,
        adapters are computed beside their base's weights, which are then read only once.
        `devices` instead of `device` share the layers; embedding and head are on the last."""
        self.merge = merge
        config = read_config(folder)
        try:
            self.model = model = describe(config)
        except Unsupported as problem:
            raise UserError(
                f"the native engine does not compute the model in {folder} ({problem}), so its "
                "layers cannot be shared among devices; leave devices empty"
            ) from problem
        devices = list(devices) or [torch.device(device)]
        spans = split_layers(len(model.windows), len(devices))
        self.device = devices[-1]
        self.layer_devices = [
            device for device, span in zip(devices, spans, strict=True) for _ in span
        ]
        self._dtype = dtype
        weights = self._weights(folder)
        self._embedding_and_head = EmbeddingAndHead(weights)
        self._stages = [
            Layers(weights.on(each), span, make_rotary(model, config, each, self.dtype))
            for each, span in zip(devices, spans, strict=True)
        ]
        self._dtype = self.dtype  # later policies may be stored in another
        weights.check_all_taken()
        self._base: Path | None = base_of(folder).resolve()
        """The folder of all weights but the adapter's."""
        if not merge:
            self._adapt(read_adapter(folder))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states, keys and values."""
        return self._embedding_and_head.dtype

    def load_weights(self, folder: Path) -> None:
        """See `Engine.load_weights`; raises `UserError`."""
        check_same(vars(self.model), folder)
        adapter = read_adapter(folder)
        base, held = base_of(folder).resolve(), self._base
        if base != held or self.merge:
            check_shapes(self.model, folder)
            weights = self._weights(folder)
            self._base = None  # until all are replaced
            # Layer by layer: a device need not hold both policies.
            for stage in self._stages:
                stage.replace(weights.on(stage.device))
            if base != held:  # adapters are of layers only
                self._embedding_and_head = EmbeddingAndHead(weights)
                weights.check_all_taken()
            self._base = base
        if not self.merge:
            self._adapt(adapter)

    def logits(self, states: Tensor) -> Tensor:
        """fp32 logits [..., vocabulary] of hidden states, before the temperature."""
        return self._embedding_and_head.logits(states)

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, length: int
    ) -> Tensor:
        """Layers and final norm: tokens, positions [B, S] below `length` → [B, S, hidden]."""
        stream = self._embedding_and_head.embed(tokens)
        for stage in self._stages:
            here = stage.device
            stream = stage(stream.to(here), positions.to(here), attention, length)
        return self._embedding_and_head.finish(stream)

    def _adapt(self, adapter: Adapter | None) -> None:
        for stage in self._stages:
            stage.adapt(adapter)

    def _weights(self, folder: Path) -> Weights:
        stored = read_weights(folder, merge=self.merge, dtype=self._dtype)
        return Weights(self.model, stored, str(folder), self.device, self._dtype)


def split_layers(count: int, devices: int) -> list[range]:
    """The range of layers of each device, in equal numbers; raises `UserError` for too few."""
    if devices > count:
        raise UserError(f"{devices} devices cannot share {count} layers; name fewer in devices")
    ends = [(index * count + devices - 1) // devices for index in range(devices + 1)]
    return [range(start, end) for start, end in pairwise(ends)]
