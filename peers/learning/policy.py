"""The policy in training, with its AdamW optimiser."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from peers.engines import loading
from peers.engines import model as policy_model
from peers.learning import adapters
from peers.learning.attention import fastest_attention, why_not
from peers.learning.batch import Batch
from peers.learning.durable import whole_folder
from peers.learning.host import Weights
from peers.learning.optimisers import begin_state, make_optimiser
from peers.learning.packing import Layout, Rows, empty_rows, lay_out
from peers.learning.ranks import Ranks
from peers.learning.scorer import Scorer
from peers.learning.settings import LearnerSettings
from peers.learning.sharding import check_compiler, local, rest, shard, whole
from peers.learning.stored import StoredPart, StoredWeights, open_stored, slices_of
from swarm.errors import UserError
from swarm.wire.manifest import Optimiser
from swarm.world.progress import report


def blank_model(base: Path, settings: LearnerSettings, ranks: Ranks) -> Any:
    """The blank model of `base`, adapters beside frozen weights if any; raises `UserError`."""
    how, device = settings.sharding, ranks.device
    if settings.attention and (reason := why_not(settings.attention, device, how.mixed_precision)):
        raise UserError(f"trainer.attention: {reason}; omit it to use the fastest available")
    if how.compile:
        check_compiler(device)
    # eval: dropout would make the ratio between two passes over the same weights differ from 1.
    model: Any = loading.blank(base, StoredWeights(base).dtype()).eval()
    model.set_attn_implementation(
        settings.attention or fastest_attention(model, device, how.mixed_precision)
    )
    if settings.adapter.rank:
        if how.tensor_parallel > 1:
            raise UserError(
                f"trainer.tensor_parallel is {how.tensor_parallel}, and the run "
                "trains adapters, which cannot be divided; omit it"
            )
        adapters.adapt(model, settings.adapter)
    else:
        loading.freeze_all_but_text(model)
    return model


@dataclass(frozen=True)
class Snapshot:
    """A policy as it was, in host memory."""

    mine: Weights
    """Whole trained parameters that this rank writes."""
    owners: dict[str, int]
    """The rank that writes each tensor of the folder; empty for an adapter's."""
    is_base: bool
    """Whether it is the policy that training began with."""


class TrainedPolicy:
    """A model with fp32 master weights, its scorer and its optimiser.

    If the run trains adapters (`adapters`), they are all that is trained, held and written."""

    def __init__(self, model: Any, base: Path, settings: LearnerSettings, ranks: Ranks) -> None:
        """Shard `model` over the ranks, and read the weights of its Hugging Face folder `base`."""
        self.ranks = ranks
        self.published_dtype: torch.dtype = model.dtype
        """The dtype of exported policies."""
        self.model = model
        self.scorer = Scorer(model)
        shard(self.scorer, loading.decoder_layers(model), ranks, settings.sharding)
        self._base = base
        self._adapter, self._seed = settings.adapter, settings.seed
        self._read_base()
        self.optimiser = make_optimiser(
            settings.sharding.optimiser,
            self.trained().values(),
            settings.optimiser,
            apart=[model.get_input_embeddings().weight, model.get_output_embeddings().weight],
        )
        half = settings.sharding.mixed_precision
        self.scorer.find_layout(ranks.device, half_precision=half, group=ranks.sharing)
        rest(self.scorer)
        self._pass_tokens = settings.sharding.pass_tokens
        flat = ranks.device.type == "cuda" or settings.flat
        self._layout: Layout | None = "flat" if flat else None

    def follow(self, numbers: Optimiser) -> None:
        """Use another version of the run's optimiser settings from now on."""
        for group in self.optimiser.param_groups:
            group.update(betas=(numbers.beta1, numbers.beta2), weight_decay=numbers.weight_decay)

    def passes(self, batch: Batch, scorer: Scorer | None = None) -> list[Rows]:
        """A batch's passes here, empty ones too, since each is a collective of all ranks."""
        passes: list[Rows] = []
        scorer = scorer or self.scorer
        if len(batch):
            layout = self._layout if scorer.packs else "padded"
            passes = lay_out(batch, layout, self._pass_tokens)
        (most,) = self.ranks.max([len(passes)])
        passes += [empty_rows()] * (int(most) - len(passes))
        return [scorer.place(rows, self.ranks.device) for rows in passes]

    def score(self, passes: Sequence[Rows]) -> Tensor:
        """Log-probabilities of a batch's completion tokens under the weights as they are."""
        return score_passes(self.scorer, passes)

    # --- weights -----------------------------------------------------------------------------

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained, by name: all of them, or the adapters."""
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def weights(self) -> Weights:
        """This rank's fp32 weights, as far as they are trained; not a copy."""
        return {name: local(value).detach() for name, value in self.trained().items()}

    def read_weights(self, folder: Path) -> Mapping[str, Tensor]:
        """This rank's part of a published policy, in its dtype, read lazily; raises `UserError`."""
        if self._adapter.rank:
            found = adapters.read_adapter(folder, self.trained(), self._adapter, self._seed)
            return {name: value.to(self.published_dtype) for name, value in found.items()}
        stored = open_stored(folder, self.model)
        self.check_fit(stored.shapes, folder)
        return StoredPart(stored, self.trained(), self.published_dtype)

    @torch.no_grad()
    def _read_base(self) -> None:
        self.assign(self.read_weights(self._base))
        frozen = dict(self.model.named_parameters())
        for name in self.trained():
            del frozen[name]
        if frozen:
            stored = open_stored(self._base, self.model)
            self.check_fit(stored.shapes, self._base, frozen)
            for name, value in StoredPart(stored, frozen, self.published_dtype).items():
                local(frozen[name]).copy_(value)

    @torch.no_grad()
    def assign(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the trained parameters."""
        for name, parameter in self.trained().items():
            local(parameter).copy_(weights[name])

    def check_fit(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        folder: Path,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Raise `UserError` unless `folder` has these names and shapes; None: the trained ones'."""
        for name, parameter in (parameters or self.trained()).items():
            found = shapes.get(name)
            if found != tuple(parameter.shape):
                model = "its config.json" if parameters or folder == self._base else self._base
                raise UserError(
                    f"{folder} holds another model than {model}: {name} has shape {found}, "
                    f"not {tuple(parameter.shape)}"
                )

    @torch.no_grad()
    def snapshot(self, *, is_base: bool = False) -> Snapshot:
        """Copy the policy to host memory, in the base's dtype, for `write`.

        With several ranks each gathers all parameters and keeps its share of them; adapters are
        rank 0's. `is_base`: it is the policy that training began with."""
        owners, writers = ({}, {}) if self._adapter.rank else self._owners
        # Frozen parts of a whole model, such as its eyes, are published, too.
        published = self.trained() if self._adapter.rank else dict(self.model.named_parameters())
        mine: Weights = {}
        for name, parameter in published.items():
            full = whole(parameter.detach().to(self.published_dtype))
            if owners.get(name, 0) == self.ranks.rank:
                mine[name] = full.to("cpu", copy=True)
        for name in owners if self.ranks.rank == 0 else ():
            if name not in published:
                mine[name] = self.model.get_buffer(name).to("cpu", copy=True)
        return Snapshot(mine, writers, is_base)

    @cached_property
    def _owners(self) -> tuple[dict[str, int], dict[str, int]]:
        """The rank that writes each parameter and buffer, and that of each tensor of the folder.

        Asked for in the learner's thread alone: a sharded model lists its state by freeing what it
        has gathered, under the pass that this thread may be in."""
        owners: dict[str, int] = {}
        loads = [0] * self.ranks.world
        for name, parameter in self.model.named_parameters():
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += parameter.numel()
        owners |= dict.fromkeys(loading.stored_buffers(self.model), 0)
        return owners, loading.published_owners(self.model, owners)

    def write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write a snapshot's folder, a model's or an adapter's, durably; in the saving thread."""
        with whole_folder(folder, self.ranks, saving=True) as aside:
            if self._adapter.rank:
                if self.ranks.rank == 0:
                    self._write_adapter(aside, snapshot)
                return
            policy_model.save_share(
                loading.published(self.model, snapshot.mine),
                aside,
                self.model.config,
                self._base,
                self.ranks.rank,
                snapshot.owners,
            )

    def _write_adapter(self, folder: Path, snapshot: Snapshot) -> None:
        """Write the adapter, or, before the first step, the whole model that it adapts."""
        if snapshot.is_base:
            adapters.write_base(folder, self._base)
        else:
            adapters.write(folder, snapshot.mine, self._adapter, self._base)

    # --- training state ----------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Weights and optimiser by their names in a training state; a load fills them in place."""
        trained = self.trained()
        state: dict[str, Tensor] = {f"model.{name}": value for name, value in trained.items()}
        for name, parameter in trained.items():
            for key, value in self.optimiser.state[parameter].items():
                state[f"optimiser.{name}.{key}{_part(parameter, key)}"] = value
        return state

    def make_optimiser_state(self, names: Collection[str], folder: Path) -> None:
        """Create the optimiser's tensors `names` for `folder` to fill; raises `UserError`."""
        for parameter in self.trained().values():
            self.optimiser.state[parameter] = begin_state(self.optimiser, parameter)
        missing = [name for name in self.state() if name not in names]
        if missing:
            raise UserError(
                f"trainer state {folder} has no {missing[0]}; resume it with the trainer.optimiser "
                "that wrote it, and if that is adamw8bit with as many ranks"
            )


def _part(parameter: Tensor, key: str) -> str:
    """The mark of a tensor that belongs to one rank's part of a parameter: its codes or scales."""
    if not isinstance(parameter, DTensor) or not key.endswith((".codes", ".scales")):
        return ""
    return f"[{','.join(f'{each.start}:{each.stop}' for each in slices_of(parameter))}]"


@torch.no_grad()
def score_passes(scorer: Scorer, passes: Sequence[Rows]) -> Tensor:
    """Log-probabilities of the passes' completion tokens with a scorer's weights, fp32 [n]."""
    device = passes[0].index.device if passes else None
    values = torch.empty(sum(len(rows.index) for rows in passes), device=device)
    for rows in passes:
        report()
        values[rows.index] = scorer(rows, entropy=False)[0]
    rest(scorer)
    return values
