"""Past policies and the reference: off the device, except while they score.

A policy's weights are needed on the device for the few passes that score a batch, and never at the
same time as the gradients. So one spare model serves all past policies. Its memory exists only
during those passes, in which no gradients do: it never adds to the peak of a training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from peers.engines.loading import decoder_layers
from peers.learning.host import HostMemory, Weights
from peers.learning.packing import Rows
from peers.learning.policy import TrainedPolicy, score_passes
from peers.learning.scorer import Scorer
from peers.learning.sharding import local, rest, shard
from swarm.jobs.training import Sharding


class PastPolicies:
    """The policies that rollouts may come from, and a spare model that scores with them.

    Past adapters, and the reference, which is the base without an adapter, need no spare model: the
    trained policy scores with them, and gets its own adapter back.
    """

    def __init__(self, spare: Any | None, trained: TrainedPolicy, sharding: Sharding) -> None:
        """`spare`: a model of the policy's architecture, whose weights are overwritten; None: the
        policy trains adapters."""
        self._trained = trained
        self._device = trained.ranks.device
        self._spare: Any = spare
        self._scorer = trained.scorer
        self._sizes: dict[str, int] = {}
        """Bytes of each of the spare model's parameters whose memory is free now."""
        if spare is not None:
            self._scorer = Scorer(spare.requires_grad_(False))
            shard(self._scorer, decoder_layers(spare), trained.ranks, sharding)
            self._scorer.share_tokens(trained.ranks.sharing)
        self._memory = HostMemory(self._device, trained.published_dtype, trained.weights())
        self.held: dict[int, Weights] = {}
        """Weights of the policies whose rollouts can be trained on, by number."""
        self.reference: Weights | None = None
        """Weights of the KL term's reference, once needed."""
        self.teacher: Weights | None = None
        """Weights of the teacher, once needed."""
        self._release()

    def keep(self, policy: int, weights: Mapping[str, Tensor], count: int) -> None:
        """Hold a policy's weights, in the dtype of published policies, and the newest `count`
        policies from now on."""
        self.forget(policy)
        for old in sorted(self.held)[: max(0, len(self.held) + 1 - count)]:
            self.forget(old)
        self.held[policy] = self._memory.copy(weights)

    def forget(self, policy: int) -> None:
        """Drop a policy, if it is held, so that its memory serves the next one."""
        weights = self.held.pop(policy, None)
        if weights is not None:
            self._memory.reuse(weights)

    def copy(self, weights: Mapping[str, Tensor]) -> Weights:
        """Weights in host memory, in the dtype of published policies."""
        return self._memory.copy(weights)

    def score(
        self, weights: Mapping[str, Tensor], batches: Sequence[Sequence[Rows]]
    ) -> list[Tensor]:
        """Log-probabilities of the completion tokens of each batch under these weights, fp32 [n].

        `batches`: each batch's passes.
        """
        with self._loaded(weights) as scorer:
            return [score_passes(scorer, passes) for passes in batches]

    @contextmanager
    def _loaded(self, weights: Mapping[str, Tensor]) -> Iterator[Scorer]:
        """Yield a scorer with these weights.

        The trained policy loses its gradients: their memory holds the spare model meanwhile.
        """
        self._trained.optimiser.zero_grad()
        own = self._assign(weights)
        try:
            yield self._scorer
        finally:
            rest(self._scorer)
            if own is not None:
                self._trained.assign(own)
            self._release()

    @torch.no_grad()
    def _assign(self, weights: Mapping[str, Tensor]) -> Weights | None:
        """Overwrite the model that scores; if it is the trained one, return its own adapter."""
        if self._spare is None:
            own = {name: value.clone() for name, value in self._trained.weights().items()}
            self._trained.assign(weights)
            return own
        self._allocate()
        ours = dict(self._trained.model.named_parameters())  # for what is frozen, such as eyes
        for name, parameter in self._spare.named_parameters():
            part = local(parameter)
            value = weights[name] if name in weights else local(ours[name])
            part.copy_(value.to(part.device, non_blocking=True))
        return None

    def _allocate(self) -> None:
        for name, parameter in self._spare.named_parameters():
            if name in self._sizes:
                local(parameter).untyped_storage().resize_(self._sizes[name])
        self._sizes.clear()

    def _release(self) -> None:
        """Free the spare model's memory on the device; FSDP may keep it in host memory."""
        if self._spare is None:
            return
        for name, parameter in self._spare.named_parameters():
            part = local(parameter)
            if part.device.type == self._device.type:
                storage = part.untyped_storage()
                self._sizes[name] = storage.nbytes()
                storage.resize_(0)
