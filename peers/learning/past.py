"""Past policies, the reference and the teacher: off the device, except while they score.

A policy's weights are needed on the device for the few passes that score a batch, and never at the
same time as the gradients. So one spare model serves all past policies. Its memory exists only
during those passes, in which no gradients do: it never adds to the peak of a training step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.engines.adapter_config import is_adapter
from peers.engines.config import read_text_config
from peers.engines.loading import decoder_layers
from peers.engines.tokenizer import vocabulary
from peers.learning.batch import AcceptedGroups, Batch
from peers.learning.host import HostMemory, Weights
from peers.learning.packing import Rows
from peers.learning.policy import TrainedPolicy, blank_model, score_passes
from peers.learning.scorer import Scorer
from peers.learning.settings import LearnerSettings
from peers.learning.sharding import local, rest, shard
from peers.learning.stored import StoredPart, open_stored
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from swarm.wire.manifest import Adapter


class PastPolicies:
    """The policies that rollouts may come from, and a spare model that scores with them.

    Past adapters, and the reference, which is the base without an adapter, need no spare model: the
    trained policy scores with them, and gets its own adapter back."""

    def __init__(self, spare: Any | None, trained: TrainedPolicy, sharding: Sharding) -> None:
        """`spare`: a model whose weights are overwritten, of the policy's architecture unless it is
        a teacher's; None: the policy trains adapters."""
        self._trained = trained
        self._device = trained.ranks.device
        self._spare: Any = spare
        self.scorer = trained.scorer
        self._sizes: dict[str, int] = {}
        """Bytes of each of the spare model's parameters whose memory is free now."""
        dtype, like = trained.published_dtype, trained.weights()
        if spare is not None:
            dtype, parameters = spare.dtype, spare.named_parameters()
            used = {name for name, each in parameters if each.requires_grad}
            self.scorer = Scorer(spare.requires_grad_(False))
            shard(self.scorer, decoder_layers(spare), trained.ranks, sharding)
            like = {name: local(value) for name, value in spare.named_parameters() if name in used}
        self._memory = HostMemory(self._device, dtype, like)
        self.held: dict[int, Weights] = {}
        """Weights of the policies whose rollouts can be trained on, by number."""
        self.reference: Weights | None = None
        """Weights of the KL term's reference, once needed."""
        self.teacher: Teacher | None = None
        """The teacher, once needed."""
        self._release()

    def keep(self, policy: int, weights: Mapping[str, Tensor], count: int) -> None:
        """Hold a policy's weights in the published dtype; keep the newest `count` from now on."""
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
        """Log-probabilities of each batch's completion tokens under these weights, fp32 [n]."""
        with self.loaded(weights) as scorer:
            return [score_passes(scorer, passes) for passes in batches]

    @contextmanager
    def loaded(self, weights: Mapping[str, Tensor]) -> Iterator[Scorer]:
        """Yield a scorer with these weights, in the memory of the trained policy's gradients."""
        self._trained.optimiser.zero_grad()
        own = self._assign(weights)
        try:
            yield self.scorer
        finally:
            rest(self.scorer)
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
        for name, parameter in self._spare.named_parameters():
            part = local(parameter)
            if name in weights:  # all but what text does not pass, such as eyes
                part.copy_(weights[name].to(part.device, non_blocking=True))
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


class Teacher:
    """Scores the policy's completions; held and sharded as the reference is."""

    def __init__(
        self, base: Path, settings: LearnerSettings, policy: TrainedPolicy, past: PastPolicies
    ) -> None:
        """Read the teacher that `settings` names, or else the base; raises `UserError`."""
        folder = Path(settings.teacher or base)
        if vocabulary(folder) != vocabulary(base):
            raise UserError(
                f"trainer.teacher {folder} has another tokenizer than the run's model; choose a "
                "teacher with the same one"
            )
        ranks = policy.ranks
        is_own = not settings.teacher or (settings.adapter.rank > 0 and is_adapter(folder))
        if is_own:
            self._past, weights = past, policy.read_weights(folder)
        else:
            model = blank_model(folder, replace(settings, adapter=Adapter()), ranks)
            self._past = PastPolicies(model, policy, settings.sharding)
            stored, parameters = open_stored(folder, model), dict(model.named_parameters())
            policy.check_fit(stored.shapes, folder, parameters)
            weights = StoredPart(stored, parameters, torch.float32)
        self._policy, self._weights = policy, self._past.copy(weights)
        if not is_own:
            half = settings.sharding.mixed_precision
            with self._past.loaded(self._weights) as scorer:
                scorer.find_layout(ranks.device, half_precision=half, group=ranks.sharing)
        self._config = read_text_config(base if is_own else folder)

    def __call__(self, given: Sequence[AcceptedGroups]) -> list[Tensor]:
        """Log-probabilities of each submission's completion tokens on this rank, fp32 [n]; NaN for
        a sequence without a prompt, or with too many or unknown tokens for the teacher."""
        device = self._policy.ranks.device
        batches, masks = zip(*map(self._readable, given), strict=True)
        passes = [self._policy.passes(batch, self._past.scorer) for batch in batches]
        scores = self._past.score(self._weights, passes)
        return [
            torch.where(mask, 0.0, math.nan).masked_scatter(mask, values.cpu()).to(device)
            for mask, values in zip(masks, scores, strict=True)
        ]

    def _readable(self, given: AcceptedGroups) -> tuple[Batch, Tensor]:
        """What the teacher can read, as it does, and which completion tokens that holds, [n]."""
        batch = given.batch(given.informative)
        rows = list(zip(batch.split(batch.tokens), batch.split(batch.sampled), strict=True))
        for index, prompt in enumerate(given.teacher_prompts or ()):
            tokens, sampled = rows[index]
            seen, begin = torch.tensor(prompt).long(), int(sampled.nonzero()[0])
            rows[index] = torch.cat([seen, tokens[begin:]]), torch.cat([seen < 0, sampled[begin:]])
        if rows:
            tokens, sampled = (torch.cat(each) for each in zip(*rows, strict=True))
            lengths = torch.tensor([len(row) for row, _ in rows])
            batch = replace(batch, tokens=tokens, sampled=sampled, lengths=lengths)
        most, size = self._config["max_position_embeddings"], self._config["vocab_size"]
        fits = [not mask[0] and len(row) <= most and int(row.max()) < size for row, mask in rows]
        readable = torch.tensor(fits).bool()
        return batch.only(readable), batch.per_token(readable)
