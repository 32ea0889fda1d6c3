"""Past policies: their published weights, and their log-probabilities of a batch's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from peers.trainer.learning.packing import Rows, Scorer
from peers.trainer.learning.policy import Weights
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.sharding import assign, rest, shard
from swarm.jobs import Sharding
from swarm.world.progress import report


class PastPolicies:
    """The policies that rollouts may come from, and a spare model that scores with them."""

    def __init__(self, spare: Any, ranks: Ranks, sharding: Sharding) -> None:
        """`spare`: a model of the policy's architecture, whose weights are overwritten."""
        self._device = ranks.device
        self._spare = spare.requires_grad_(False)
        self._scorer = Scorer(self._spare)
        shard(self._scorer, self._spare.model.layers, ranks, sharding)
        self._weights: dict[int, Weights] = {}
        self.reference: Weights | None = None
        """Weights of the KL term's reference, once needed."""

    def numbers(self) -> list[int]:
        """The policies held, ascending."""
        return sorted(self._weights)

    def __contains__(self, policy: int) -> bool:
        return policy in self._weights

    def __getitem__(self, policy: int) -> Weights:
        return self._weights[policy]

    def keep(self, policy: int, weights: Weights, count: int) -> None:
        """Add a policy and hold the newest `count` from now on."""
        self._weights[policy] = weights
        for old in self.numbers()[:-count]:
            del self._weights[old]

    def clear(self) -> None:
        """Drop all policies."""
        self._weights.clear()

    @torch.no_grad()
    def score(self, weights: Weights, passes: Sequence[Rows]) -> Tensor:
        """Log-probabilities of a batch's completion tokens under these weights, fp32 [n]."""
        assign(self._spare, weights)
        values = torch.empty(sum(len(rows.index) for rows in passes), device=self._device)
        for rows in passes:
            report()
            values[rows.index] = self._scorer(rows, entropy=False)[0]
        rest(self._scorer)
        return values
