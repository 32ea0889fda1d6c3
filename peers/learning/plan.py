"""What each rank of a trainer holds in memory, by part, from a model's config.json alone.

Parameters, gradients, moments and held policies are exact. A pass is counted on fake tensors
(`activations`). What FSDP gathers is computed from its grouping: two layers, and all parameters
outside layers. The figures of the processes themselves are estimates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from peers.engines.architecture import describe
from peers.engines.model import blank
from peers.learning.activations import FUSED, Activations, Pass, activations
from peers.learning.adapters import adapt
from peers.learning.optimisers import BLOCK, PIECE, QUANTISED_MIN
from peers.learning.tensor_parallel import divide_blank
from swarm.errors import UserError
from swarm.jobs.memory import MemoryPart, MemoryPlan, fullest, shown, total
from swarm.jobs.training import Sharding
from swarm.wire.manifest import Adapter

GB = 10**9

PROCESS_BYTES = {"cpu": GB // 2, "cuda": 3 * GB}
"""Host memory of a rank's process with its libraries. 0.4 GB were measured on a CPU."""

CONTEXT_BYTES = 2 * GB
"""Memory of a GPU that CUDA, NCCL and the allocator's gaps take. An estimate."""

RANKS_MAX = 1024
"""Most ranks that an advice tries."""

PIECE_BYTES = {"adamw": 0, "adamw8bit": 44, "offloaded": 8}
"""Bytes on the device per element of the piece that an optimiser steps (`optimisers.PIECE`): two
fp32 moments; quantising adds the indices of its search, in 64 bits."""


class Thin(NamedTuple):
    """The shape of a run's adapters."""

    rank: int = 0
    """0: the whole model is trained."""
    targets: tuple[str, ...] = ()


NO_ADAPTER = Thin()


@dataclass(frozen=True)
class Model:
    """A model's shapes."""

    folder: Path | None
    """With its config.json; None: only the number of parameters is known."""
    parameters: int
    """All parameters, except adapters."""
    tensor_parallel: int
    """Ranks over which the matrices of the layers are divided."""
    layers: tuple[tuple[torch.Size, ...], ...]
    """Shapes of the parameters in each layer, of which a rank has its part of the matrices."""
    others: tuple[torch.Size, ...]
    """Shapes of all other parameters; tied ones once."""
    largest: int
    """Elements of the largest trained parameter, undivided; 0 where it is unknown."""
    buffers: int
    """Bytes."""
    published: int
    """Bytes per parameter of a published policy."""
    capped: bool
    """Whether attention scores are capped, which on a CPU only `eager` attention can do."""
    adapter: Thin = NO_ADAPTER
    adapters: tuple[tuple[torch.Size, ...], ...] = ()
    """Shapes of the adapters' matrices in each layer; empty: all parameters are trained."""

    def shapes(self) -> Iterator[torch.Size]:
        """Of all parameters except adapters."""
        yield from self.others
        for layer in self.layers:
            yield from layer

    def trained(self) -> Iterator[torch.Size]:
        """Of the parameters that are trained."""
        if not self.adapters:
            yield from self.shapes()
        for layer in self.adapters:
            yield from layer


@dataclass(frozen=True)
class Machine:
    """Where ranks run. Limits of 0 are unknown."""

    device: str
    """`cuda` or `cpu`."""
    ranks: int = 1
    ranks_here: int = 1
    """Ranks of one machine, which share its host memory."""
    device_limit: int = 0
    """Bytes of one rank's device."""
    host_limit: int = 0
    """Bytes of one machine's host memory."""


@dataclass(frozen=True)
class Workload:
    """What the trainer is to do."""

    tokens: int
    """Tokens in one forward pass, unless `pass_tokens` asks for fewer."""
    longest: int
    """Tokens of the longest sequence, which a pass never divides."""
    held: int
    """Older policies held at once."""
    reference: bool
    """Whether the objective needs the reference."""
    process: bool = False
    """Whether a second model is trained, for process rewards."""


@functools.lru_cache(maxsize=2)
def read_model(folder: Path, adapter: Thin = NO_ADAPTER, tensor_parallel: int = 1) -> Model:
    """The shapes of the model in a folder with a config.json, with its matrices divided over
    `tensor_parallel` ranks; raises `UserError`."""
    model = _blank(folder, adapter)
    sizes = [each.numel() for each in model.parameters() if each.requires_grad]
    frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad)
    if tensor_parallel > 1:
        divide_blank(model, tensor_parallel)
    layers = [list(layer.parameters()) for layer in model.model.layers]
    inside = {id(parameter) for layer in layers for parameter in layer}
    thin: list[tuple[torch.Size, ...]] = []
    if adapter.rank:
        thin = [tuple(each.shape for each in layer if each.requires_grad) for layer in layers]
        layers = [[each for each in layer if not each.requires_grad] for layer in layers]
    return Model(
        folder=folder,
        parameters=frozen or sum(sizes),
        tensor_parallel=tensor_parallel,
        adapter=adapter,
        adapters=tuple(thin),
        layers=tuple(tuple(each.shape for each in layer) for layer in layers),
        others=tuple(each.shape for each in model.parameters() if id(each) not in inside),
        largest=max(sizes),
        buffers=sum(each.numel() * 4 for each in model.buffers()),
        published=model.dtype.itemsize,
        capped=describe(model.config.to_dict()).attention_cap is not None,
    )


def of_parameters(count: int, tensor_parallel: int = 1) -> Model:
    """A model of which only the number of parameters is known; it has no activations."""
    return Model(
        folder=None,
        parameters=count,
        tensor_parallel=tensor_parallel,
        layers=(),
        others=(torch.Size([-(-count // tensor_parallel)]),),
        largest=0,
        buffers=0,
        published=2,
        capped=False,
    )


def _blank(folder: Path, adapter: Thin) -> Any:
    model = blank(folder, torch.bfloat16).eval()
    if adapter.rank:
        adapt(model, Adapter(rank=adapter.rank, targets=list(adapter.targets)))
    return model


@functools.lru_cache(maxsize=32)
def _activations(
    folder: Path | None, adapter: Thin, tensor_parallel: int, asked: Pass
) -> Activations:
    if folder is None:
        return Activations(0, 0, 0)
    model = _blank(folder, adapter)
    if tensor_parallel > 1:
        divide_blank(model, tensor_parallel)
    return activations(model, asked)


def plan(model: Model, sharding: Sharding, machine: Machine, work: Workload) -> MemoryPlan:
    """Plan one rank's memory; `problem` says what would make it fit."""
    found = _plan(model, sharding, machine, work)
    problem = _problem(found, machine)
    if problem:
        advice = _advise(model, sharding, machine, work)
        found = msgspec.structs.replace(found, problem=f"{problem}; {advice}")
    return found


def fit(model: Model, sharding: Sharding, machine: Machine, work: Workload) -> MemoryPlan:
    """Plan one rank's memory with passes as large as fit, unless `pass_tokens` says how large.

    A pass is halved until the memory suffices, down to the longest sequence. Smaller passes take
    more kernel launches and give the same gradients.
    """
    found = _plan(model, sharding, machine, work)
    tokens = work.tokens
    while not sharding.pass_tokens and tokens > work.longest and _excess(found):
        tokens = max(work.longest, tokens // 2)
        found = _plan(model, _changed(sharding, {"pass_tokens": tokens}), machine, work)
    if not _excess(found):
        return found
    return plan(model, _changed(sharding, {"pass_tokens": found.tokens}), machine, work)


def _plan(model: Model, sharding: Sharding, machine: Machine, work: Workload) -> MemoryPlan:
    if sharding.replicas < 1 or machine.ranks % sharding.replicas:
        raise UserError(
            f"trainer.replicas is {sharding.replicas}, which does not divide the "
            f"{machine.ranks} ranks"
        )
    copy = machine.ranks // sharding.replicas
    if copy % model.tensor_parallel:
        raise UserError(
            f"trainer.tensor_parallel is {model.tensor_parallel}, which does not divide the "
            f"{copy} ranks of a copy of the policy"
        )
    most = sharding.pass_tokens or work.tokens
    work = replace(work, tokens=max(work.longest, min(most, work.tokens)))
    parts = [part for part in _parts(model, sharding, machine, work) if part.bytes]
    if machine.device == "cpu":
        parts = [msgspec.structs.replace(part, memory="host") for part in parts]
    return MemoryPlan(
        parameters=model.parameters,
        ranks=machine.ranks,
        tokens=work.tokens,
        parts=parts,
        device_bytes=total(fullest(parts, "device")),
        device_limit=machine.device_limit,
        host_bytes=total(fullest(parts, "host")) * machine.ranks_here,
        host_limit=machine.host_limit,
    )


def _parts(
    model: Model, sharding: Sharding, machine: Machine, work: Workload
) -> Iterator[MemoryPart]:
    shards = machine.ranks // (sharding.replicas * model.tensor_parallel)
    mine = [_rows(shape, shards) for shape in model.trained()]
    count = sum(mine)
    home = "host" if sharding.cpu_offload else "device"
    moments = sum(_moment_bytes(each, sharding.optimiser) for each in mine)
    moments_home = "host" if sharding.optimiser == "offloaded" else home
    dtype = torch.bfloat16 if sharding.mixed_precision else torch.float32
    attention = "eager" if model.capped and machine.device == "cpu" else FUSED
    asked = Pass(
        tokens=work.tokens,
        dtype=dtype,
        checkpointing=sharding.activation_checkpointing,
        device=machine.device,
        keep_products=sharding.keep_products,
        attention=attention,
    )
    pass_ = _activations(model.folder, model.adapter, model.tensor_parallel, asked)

    frozen = 0
    if model.adapters:
        itemsize = model.published if sharding.mixed_precision else 4
        frozen = itemsize * sum(_rows(shape, shards) for shape in model.shapes())
        yield _part("weights of the frozen base", home, "always", frozen)
    what = "adapters" if model.adapters else "weights"
    yield _part(f"{what}, fp32", home, "always", 4 * count)
    yield _part("optimiser states", moments_home, "always", moments)
    if work.process:
        yield _part("model of process rewards", home, "always", 4 * count + frozen)
        yield _part("its optimiser states", moments_home, "always", moments)
    yield _part("buffers", "device", "always", (1 + work.process) * model.buffers)
    yield _part("gradients, fp32", home, "training", 4 * count)
    yield _part("activations and logits", "device", "training", pass_.training)
    yield _part("activations and logits, without gradients", "device", "scoring", pass_.scoring)
    stays = sharding.cpu_offload and machine.device == "cuda"  # in FSDP's pinned memory
    spare = "copy of the adapters" if model.adapters else "spare model"
    yield _part(f"{spare}, fp32", home, "always" if stays else "scoring", 4 * count)
    sharded = machine.ranks > 1 or sharding.mixed_precision or sharding.cpu_offload
    if sharded and model.layers:
        yield from _gathered(
            model, dtype.itemsize, pass_, shards if sharding.expert_parallel else 1
        )
    yield _part("gradients, fp32", home, "stepping", 4 * count)
    piece = min(PIECE, max(mine)) * PIECE_BYTES[sharding.optimiser]
    yield _part("moments in the step", "device", "stepping", piece)
    yield _part("gradients, fp32", home, "publishing", 4 * count)
    largest = 2 * model.largest * model.published
    yield _part("largest parameter, gathered", "device", "publishing", largest)

    on_disk = sharding.past_policies == "disk" and not model.adapters
    policies = 1 if on_disk else work.held + work.reference
    thin = sum(shape.numel() for layer in model.adapters for shape in layer)
    share = -(-(thin or model.parameters) // machine.ranks) * model.published
    yield _part("past policies and reference", "host", "always", policies * count * model.published)
    state = (1 + work.process) * (4 * count + moments)
    yield _part("copy of the training state", "host", "always", state)
    yield _part("copy of a policy to publish, its share", "host", "always", share)
    yield _part("process", "host", "always", PROCESS_BYTES[machine.device])
    if machine.device == "cuda":
        yield _part("CUDA, NCCL and gaps", "device", "always", CONTEXT_BYTES)


def _gathered(
    model: Model, itemsize: int, pass_: Activations, expert_parts: int
) -> Iterator[MemoryPart]:
    """What FSDP gathers: all parameters outside layers, the layer computed and the next one.

    Of the experts it is one of `expert_parts`; their tensors alone have three dimensions.

    A layer is gathered into a buffer and copied out. Its gradients are reduced in fp32 while the
    next layer's are computed; those of the other parameters wait until no activations are left.
    """
    layer = max(
        sum(shape.numel() // (expert_parts if len(shape) > 2 else 1) for shape in layer)
        for layer in model.layers
    )
    others = sum(shape.numel() for shape in model.others)
    weights = (others + 3 * layer) * itemsize
    yield _part("weights, gathered", "device", "training", weights)
    yield _part("weights, gathered", "device", "scoring", weights)
    if model.adapters:  # the others have no gradients
        others, layer = 0, max(sum(shape.numel() for shape in layer) for layer in model.adapters)
    early = (others + 2 * layer) * itemsize + 2 * layer * 4
    late = others * (itemsize + 4) - pass_.training
    yield _part("gradients, not yet reduced", "device", "training", max(early, late))


def _part(name: str, memory: str, phase: str, size: int) -> MemoryPart:
    return msgspec.convert(
        {"name": name, "memory": memory, "phase": phase, "bytes": int(size)}, MemoryPart
    )


def _rows(shape: torch.Size, shards: int) -> int:
    """Elements of the largest part of a parameter that is divided by rows."""
    if not shape:
        return 1
    return -(-shape[0] // shards) * math.prod(shape[1:])


def _moment_bytes(elements: int, optimiser: str) -> int:
    """Bytes of one parameter's AdamW state."""
    if optimiser == "adamw8bit" and elements >= QUANTISED_MIN and elements % BLOCK == 0:
        return 2 * (elements + elements // BLOCK * 4) + 4
    return 8 * elements + 4


# --- advice --------------------------------------------------------------------------------------


def _problem(found: MemoryPlan, machine: Machine) -> str:
    """What does not fit, and by how much; empty if all fits."""
    each = "each of the ranks needs" if found.ranks > 1 else "the trainer needs"
    if found.device_limit and found.device_bytes > found.device_limit:
        over = found.device_bytes - found.device_limit
        return (
            f"{each} {shown(found.device_bytes)} of device memory, "
            f"{shown(over)} more than its {shown(found.device_limit)}"
        )
    if found.host_limit and found.host_bytes > found.host_limit:
        over = found.host_bytes - found.host_limit
        who = f"the {machine.ranks_here} ranks of a machine need"
        return (
            f"{who if machine.ranks_here > 1 else 'the trainer needs'} "
            f"{shown(found.host_bytes)} of main memory, {shown(over)} more than its "
            f"{shown(found.host_limit)}"
        )
    return ""


def _advise(model: Model, sharding: Sharding, machine: Machine, work: Workload) -> str:
    """What would make it fit: one setting, else several together, else more ranks."""
    wanted = [
        {name: value}
        for name, value in _savings(sharding, work)
        if getattr(sharding, name) != value
    ]
    for each in wanted:
        if not _excess(_plan(model, _changed(sharding, each), machine, work)):
            return f"{_words(each)} would make it fit"
    together: dict[str, bool | int | str] = {}
    least = _excess(_plan(model, sharding, machine, work))
    for each in wanted:
        excess = _excess(_plan(model, _changed(sharding, together | each), machine, work))
        if excess < least:
            together, least = together | each, excess
        if not excess:
            for name in list(together):  # drop what a later change made needless
                fewer = {other: together[other] for other in together if other != name}
                if not _excess(_plan(model, _changed(sharding, fewer), machine, work)):
                    together = fewer
            return f"{_words(together)} together would make it fit"
    words = f"{_words(together)} and " if together else ""
    while machine.ranks < RANKS_MAX:
        machine = replace(machine, ranks=2 * machine.ranks)
        if not _excess(_plan(model, _changed(sharding, together), machine, work)):
            return f"{words}{machine.ranks} ranks would make it fit"
    return "no setting and no number of ranks would make it fit"


def _savings(sharding: Sharding, work: Workload) -> Iterator[tuple[str, bool | int | str]]:
    """Settings that save memory, those that cost the least time first."""
    yield "activation_checkpointing", True
    yield "keep_products", False
    if work.longest < min(work.tokens, sharding.pass_tokens or work.tokens):
        yield "pass_tokens", work.longest
    if sharding.optimiser == "adamw":
        yield "optimiser", "adamw8bit"
    yield "past_policies", "disk"
    yield "replicas", 1
    yield "optimiser", "offloaded"
    yield "cpu_offload", True


def _changed(sharding: Sharding, changes: Mapping[str, bool | int | str]) -> Sharding:
    return msgspec.structs.replace(sharding, **changes)


def _words(changes: Mapping[str, bool | int | str]) -> str:
    values = {
        name: f'"{value}"' if isinstance(value, str) else str(value).lower()
        for name, value in changes.items()
    }
    return ", ".join(f"trainer.{name} = {value}" for name, value in values.items())


def _excess(found: MemoryPlan) -> int:
    """Bytes that are missing, of both memories."""
    return sum(
        max(0, needed - limit)
        for needed, limit in (
            (found.device_bytes, found.device_limit),
            (found.host_bytes, found.host_limit),
        )
        if limit
    )
