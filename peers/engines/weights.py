"""A checkpoint's tensors, taken one by one for the decoder, each with its shape checked."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.engines.architecture import Architecture, Experts
from peers.engines.projection import Dense, Mixture, Projection, packed
from swarm.errors import UserError

_IGNORED = (".rotary_emb.inv_freq",)
"""Ends of names of tensors that old checkpoints hold and nothing reads."""


@dataclass(eq=False)
class Weights:
    """The tensors of one policy, on the engine's device and in its dtype."""

    model: Architecture
    _stored: dict[str, Tensor]
    """Emptied, so that memory never holds the policy twice."""
    _source: str
    """The policy's name in errors."""
    device: torch.device
    _dtype: torch.dtype | None

    def on(self, device: torch.device) -> "Weights":
        """The same tensors, for another device."""
        return Weights(self.model, self._stored, self._source, device, self._dtype)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name; raises `UserError` unless it exists and has this shape."""
        # A copy on a CPU, too: the checkpoint's mapped file may be deleted.
        return self._find(name, shape).to(self.device, self._dtype, copy=True)

    def _find(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._stored.pop(name, None)
        if found is None:
            raise UserError(f"the weights in {self._source} lack {name}")
        if found.shape != shape:
            raise UserError(
                f"{name} in {self._source} has shape {list(found.shape)}, not {list(shape)}"
            )
        return found

    def mlp(self, at: str) -> Dense | Mixture:
        """The MLP of a layer, whose tensors' names begin with `at`."""
        hidden, inner = self.model.hidden_size, self.model.intermediate_size
        if self.model.experts is not None:
            return self._mixture(at, self.model.experts)
        return Dense(
            self.projection({f"{at}gate_proj": inner, f"{at}up_proj": inner}, hidden),
            self.projection({f"{at}down_proj": hidden}, inner),
        )

    def projection(
        self, modules: Mapping[str, int], inputs: int, *, bias: bool = False
    ) -> Projection:
        """The stacked matrices of some modules, each with its number of outputs."""
        weights = [
            self._find(f"{name}.weight", (size, inputs)).to(self.device, self._dtype)
            for name, size in modules.items()
        ]
        biases = [self.take(f"{name}.bias", size) for name, size in modules.items() if bias]
        return Projection(
            packed(torch.cat(weights)), torch.cat(biases) if bias else None, tuple(modules.items())
        )

    def _mixture(self, at: str, how: Experts) -> Mixture:
        hidden, inner = self.model.hidden_size, how.inner_size
        return Mixture(
            how=how,
            router=self.take(f"{at}gate.weight", how.count, hidden),
            gate_up=self.take(f"{at}experts.gate_up_proj", how.count, 2 * inner, hidden),
            down=self.take(f"{at}experts.down_proj", how.count, hidden, inner),
        )

    def check_all_taken(self) -> None:
        """Raise `UserError` if the checkpoint holds a tensor that this model does not have."""
        tied = {"lm_head.weight"} if self.model.tied else set()
        left = [name for name in sorted(self._stored.keys() - tied) if not name.endswith(_IGNORED)]
        if left:
            raise UserError(
                f"the weights in {self._source} hold {left[0]}, which a {self.model.family} model "
                "with this config.json does not have"
            )
