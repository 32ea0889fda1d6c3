"""What each rank of a trainer holds in memory, by part, from a model's config.json alone.

Parameters, gradients, moments and held policies are those of a model on torch's device `meta`. A
pass is counted on fake tensors (`activations`). What FSDP gathers is computed from its grouping:
two layers, and all parameters outside layers. The figures of the processes are estimates."""

import functools
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec.structs import replace as changed
from torch import Tensor

from peers.engines.config import read_config
from peers.engines.device import find_dtype
from peers.engines.loading import blank, decoder_layers
from peers.learning.activations import FUSED, Activations, Pass, activations
from peers.learning.adapters import adapt
from peers.learning.attention import fastest_attention
from peers.learning.optimisers import BLOCK, PIECE, QUANTISED_MIN
from peers.learning.ranks import Ranks
from peers.learning.sharding import check_layout
from peers.learning.tensor_parallel import divide_blank
from swarm.jobs.memory import MemoryPart, MemoryPlan, Phase, fullest, total
from swarm.jobs.training import Sharding
from swarm.terminal.figures import readable_bytes
from swarm.wire.manifest import Adapter
from swarm.world.machine import free_memory_bytes

GB = 10**9
CPU = torch.device("cpu")

PROCESS_BYTES = {"cpu": GB // 2, "cuda": 3 * GB}
"""Host memory of a rank's process with its libraries. 0.4 GB were measured on a CPU."""

CONTEXT_BYTES = 2 * GB
"""Memory of a GPU that CUDA, NCCL and the allocator's gaps take. An estimate."""

PIECE_BYTES = {"adamw": 0, "adamw8bit": 44, "muon": 0}
"""Bytes on the device per element of the piece that an optimiser steps (`optimisers.PIECE`): two
fp32 moments; quantising adds the indices of its search, in 64 bits."""


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


def sharding_of(model: Path, dtype: str, how: Sharding, device: torch.device) -> Sharding:
    """A layout with the precision that `dtype` means here for a model stored as its config says."""
    config = read_config(model)
    if dtype == "auto" and "bfloat16" in (config.get("dtype"), config.get("torch_dtype")):
        dtype = "fastest"
    return changed(how, mixed_precision=find_dtype(dtype, device) == torch.bfloat16)


def machine_of(ranks: Ranks) -> Machine:
    """This machine, with what is free of its memory now; the same on every rank."""
    kind = ranks.device.type
    device = 0
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        device = min(total, free + CONTEXT_BYTES)  # this process has its context already
    here = min(ranks.world, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world)))
    host = free_memory_bytes()
    host = 0 if host == sys.maxsize else host  # unknown
    device, host = [-int(most) for most in ranks.max([-device, -host])]
    return Machine(
        device=kind,
        ranks=ranks.world,
        ranks_here=here,
        device_limit=device,
        host_limit=host + here * PROCESS_BYTES[kind] if host else 0,  # whose libraries are loaded
    )


@dataclass(frozen=True)
class Workload:
    """What the trainer is to do."""

    tokens: int
    """Tokens in one forward pass, unless `pass_tokens` asks for fewer."""
    longest: int
    """Tokens of the longest sequence, which a pass never divides."""
    held: int
    """Older policies held at once."""
    reference: int
    """The reference and a teacher of the policy's shape, as far as the objective needs them."""
    process: bool = False
    """Whether a second model is trained, for process rewards."""
    saves: bool = True
    """Whether states and policies are copied, to be written beside the next step."""
    table: str = "trainer"
    """The table of the settings that would need less."""
    teacher: "Model | None" = None
    """A teacher that is a model of its own."""


def of_rounds(tokens: int, longest: int) -> Workload:
    """The work of one of several trainers, which takes inner steps with one policy alone, in passes
    of `tokens`, or of its sequences of `longest` tokens."""
    return Workload(
        max(tokens, longest), longest, held=0, reference=0, saves=False, table="replica"
    )


@dataclass(frozen=True)
class Model:
    """Which model is trained: that of a folder with a config.json, or adapters of it."""

    folder: Path
    rank: int = 0
    """Of the adapters; 0: the whole model is trained."""
    targets: tuple[str, ...] = ()

    def blank(self, tensor_parallel: int = 1) -> Any:
        """The model without weights, with its matrices divided over so many ranks."""
        model = blank(self.folder, torch.bfloat16).eval()
        if self.rank:
            adapt(model, Adapter(rank=self.rank, targets=list(self.targets)))
        if tensor_parallel > 1:
            divide_blank(model, tensor_parallel)
        return model

    @functools.lru_cache(maxsize=4)  # noqa: B019 (plans are few)
    def shape(self, tensor_parallel: int = 1) -> Any:
        """The same, only to be looked at."""
        return self.blank(tensor_parallel)

    @functools.lru_cache(maxsize=32)  # noqa: B019
    def activations(self, tensor_parallel: int, asked: Pass) -> Activations:
        return activations(self.blank(tensor_parallel), asked)


def plan(model: Model, sharding: Sharding, machine: Machine, work: Workload) -> MemoryPlan:
    """Plan one rank's memory; `problem` says what does not fit and helps; raises `UserError`."""
    found = _plan(model, sharding, machine, work)
    problem = _problem(found, machine)
    if problem:
        found = changed(found, problem=f"{problem}; {_advise(sharding, work)}")
    return found


def fit(model: Model, sharding: Sharding, machine: Machine, work: Workload) -> MemoryPlan:
    """Plan one rank's memory with passes of `pass_tokens`, or halved until they fit."""
    found = _plan(model, sharding, machine, work)
    tokens = work.tokens
    while not sharding.pass_tokens and tokens > work.longest and _excess(found):
        tokens = max(work.longest, tokens // 2)
        found = _plan(model, changed(sharding, pass_tokens=tokens), machine, work)
    if not _excess(found):
        return found
    return plan(model, changed(sharding, pass_tokens=found.tokens), machine, work)


def _plan(model: Model, sharding: Sharding, machine: Machine, work: Workload) -> MemoryPlan:
    check_layout(sharding, machine.ranks, model.shape(), work.table)
    most = sharding.pass_tokens or work.tokens
    work = replace(work, tokens=max(work.longest, min(most, work.tokens)))
    parts = [part for part in _parts(model, sharding, machine, work) if part.bytes]
    if machine.device == "cpu":
        parts = [changed(part, memory="host") for part in parts]
    return MemoryPlan(
        parameters=_count(_of(model.shape(), trained=not model.rank)),
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
    shape, whole = model.shape(sharding.tensor_parallel), model.shape()
    published = whole.dtype.itemsize
    shards = machine.ranks // (sharding.replicas * sharding.tensor_parallel)
    mine = [_rows(each, shards) for each in _of(shape, trained=True)]
    count = sum(mine)
    home: Memory = "host" if sharding.cpu_offload else "device"
    moments = sum(_moment_bytes(each, sharding.optimiser) for each in mine)
    dtype = torch.bfloat16 if sharding.mixed_precision else torch.float32
    on_cpu = machine.device == "cpu"
    eager = on_cpu and fastest_attention(whole, CPU) == "eager"
    # The scores of `eager` grow with the square of a pass's tokens, and are shared by heads.
    share = sharding.sequence_parallel ** (0.5 if eager else 1)
    asked = Pass(
        tokens=math.ceil(work.tokens / share),
        dtype=dtype,
        checkpointing=sharding.activation_checkpointing,
        device=machine.device,
        attention="eager" if eager else FUSED,
    )
    pass_ = model.activations(sharding.tensor_parallel, asked)

    itemsize = published if sharding.mixed_precision else 4
    frozen = itemsize * sum(_rows(each, shards) for each in _of(shape, trained=False))
    yield _part("weights of the frozen base", home, "always", frozen)
    what = "adapters" if model.rank else "weights"
    yield _part(f"{what}, fp32", home, "always", 4 * count)
    yield _part("optimiser states", home, "always", moments)
    if work.process:
        yield _part("model of process rewards", home, "always", 4 * count + frozen)
        yield _part("its optimiser states", home, "always", moments)
    buffers = sum(each.numel() * 4 for each in whole.buffers())
    yield _part("buffers", "device", "always", (1 + work.process) * buffers)
    yield _part("gradients, fp32", home, "training", 4 * count)
    yield _part("activations and logits", "device", "training", pass_.training)
    yield _part("activations and logits, without gradients", "device", "scoring", pass_.scoring)
    # Past policies score without gradients, so their copy is not held while there are any.
    stays = sharding.cpu_offload and machine.device == "cuda"  # in FSDP's pinned memory
    spare = "copy of the adapters" if model.rank else "spare model"
    if work.held:
        yield _part(f"{spare}, fp32", home, "always" if stays else "scoring", 4 * count)
    if machine.ranks > 1 or sharding.mixed_precision or sharding.cpu_offload:
        parts = shards if sharding.expert_parallel else 1
        yield from _gathered(shape, dtype.itemsize, pass_, parts, adapts=bool(model.rank))
    yield _part("gradients, fp32", home, "stepping", 4 * count)
    piece = min(PIECE, max(mine)) * PIECE_BYTES[sharding.optimiser]
    yield _part("moments in the step", "device", "stepping", piece)
    yield _part("gradients, fp32", home, "publishing", 4 * count)
    trained = _of(whole, trained=True)
    largest = 2 * max(each.numel() for each in trained) * published
    yield _part("largest parameter, gathered", "device", "publishing", largest)

    policies = work.held + work.reference
    yield _part("past policies and reference", "host", "always", policies * count * published)
    if work.saves:
        state = (1 + work.process) * (4 * count + moments)
        yield _part("copy of the training state", "host", "always", state)
        share = -(-_count(trained) // machine.ranks) * published
        yield _part("copy of a policy to publish, its share", "host", "always", share)
    yield _part("process", "host", "always", PROCESS_BYTES[machine.device])
    if machine.device == "cuda":
        yield _part("CUDA, NCCL and gaps", "device", "always", CONTEXT_BYTES)
    if work.teacher is not None:  # held as one policy is that only scores
        alone = replace(work, held=1, reference=0, process=False, teacher=None)
        for part in _parts(work.teacher, sharding, machine, alone):
            name = part.name.replace("past policies and reference", "weights")
            if part.phase == "scoring" or name in ("weights", "spare model, fp32", "buffers"):
                phase: Phase = "always" if part.phase == "always" else "asking"
                yield changed(part, name=f"teacher's {name}", phase=phase)


def _gathered(
    shape: Any, itemsize: int, pass_: Activations, expert_parts: int, *, adapts: bool
) -> Iterator[MemoryPart]:
    """What FSDP gathers: all parameters outside layers, the layer computed and the next one.

    Of the experts it is one of `expert_parts`; their tensors alone have three dimensions.

    A layer is gathered into a buffer and copied out. Its gradients are reduced in fp32 while the
    next layer's are computed; those of the other parameters wait until no activations are left."""
    layers = [_of(layer, trained=not adapts) for layer in decoder_layers(shape)]
    layer = max(
        sum(each.numel() // (expert_parts if each.ndim > 2 else 1) for each in some)
        for some in layers
    )
    others = _count(_of(shape, trained=not adapts)) - sum(map(_count, layers))
    # This layer, the next one, and the buffer out of which one of them is copied.
    weights = (others + 3 * layer) * itemsize
    yield _part("weights, gathered", "device", "training", weights)
    yield _part("weights, gathered", "device", "scoring", weights)
    if adapts:  # the others have no gradients
        others, layer = 0, max(_count(_of(each, trained=True)) for each in decoder_layers(shape))
    # Either during the layers' backward passes, beside the activations, or at the end, in place of
    # them: they count in the same phase, so the late figure takes them off.
    early = (others + 2 * layer) * itemsize + 2 * layer * 4
    late = others * (itemsize + 4) - pass_.training
    yield _part("gradients, not yet reduced", "device", "training", max(early, late))


Memory = Literal["device", "host"]


def _part(name: str, memory: Memory, phase: Phase, size: int) -> MemoryPart:
    return MemoryPart(name=name, memory=memory, phase=phase, bytes=size)


def _of(module: Any, *, trained: bool) -> list[Tensor]:
    return [each for each in module.parameters() if each.requires_grad == trained]


def _count(parameters: list[Tensor]) -> int:
    return sum(each.numel() for each in parameters)


def _rows(parameter: Tensor, shards: int) -> int:
    """Elements of the largest part of a parameter that is divided by rows."""
    if not parameter.ndim:
        return 1
    return -(-parameter.shape[0] // shards) * math.prod(parameter.shape[1:])


def _moment_bytes(elements: int, optimiser: str) -> int:
    if optimiser == "adamw8bit" and elements >= QUANTISED_MIN and elements % BLOCK == 0:
        return 2 * (elements + elements // BLOCK * 4) + 4
    return 8 * elements + 4


# --- advice --------------------------------------------------------------------------------------


def _problem(found: MemoryPlan, machine: Machine) -> str:
    """What does not fit, and by how much; empty if all fits."""
    here, several = machine.ranks_here, found.ranks > 1
    on_device = "each of the ranks needs" if several else "the trainer needs"
    on_host = f"the {here} ranks of a machine need" if here > 1 else "the trainer needs"
    for who, needed, limit, memory in (
        (on_device, found.device_bytes, found.device_limit, "device"),
        (on_host, found.host_bytes, found.host_limit, "main"),
    ):
        if limit and needed > limit:
            over = readable_bytes(needed - limit)
            takes, has = readable_bytes(needed), readable_bytes(limit)
            return f"{who} {takes} of {memory} memory, {over} more than its {has}"
    return ""


def _advise(sharding: Sharding, work: Workload) -> str:
    """What would need less memory, what costs the least time first."""
    wanted = [
        f"{work.table}.{name} = " + (f'"{value}"' if isinstance(value, str) else str(value).lower())
        for name, value in _savings(sharding, work)
        if getattr(sharding, name) != value
    ]
    return f"less is needed with {', '.join([*wanted, 'more ranks'])}"


def _savings(sharding: Sharding, work: Workload) -> Iterator[tuple[str, bool | int | str]]:
    """Settings that save memory, those that cost the least time first."""
    yield "activation_checkpointing", True
    if work.longest < min(work.tokens, sharding.pass_tokens or work.tokens):
        yield "pass_tokens", work.longest
    if sharding.optimiser == "adamw":
        yield "optimiser", "adamw8bit"
    yield "replicas", 1
    yield "cpu_offload", True


def _excess(found: MemoryPlan) -> int:
    """Bytes that are missing, of both memories."""
    device = max(0, found.device_bytes - found.device_limit) if found.device_limit else 0
    return device + (max(0, found.host_bytes - found.host_limit) if found.host_limit else 0)
