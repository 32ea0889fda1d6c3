"""Sharding of a policy over ranks by FSDP2, with mixed precision, checkpointing and offload.

Parameters stay in fp32: they are the master weights that AdamW steps. Mixed precision only changes
the dtype of gathering and computing. Several replicas (`Ranks.make_mesh`) make it HSDP."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers.distributed.tensor_parallel import EpDispatchExpertsParallel

from peers.learning.ranks import Ranks
from peers.learning.tensor_parallel import divide
from swarm.errors import UserError
from swarm.jobs.training import Sharding

APART = (
    ("compile", "expert_parallel"),
    ("compile", "sequence_parallel"),
    ("tensor_parallel", "sequence_parallel"),
)
"""Settings that exclude each other."""


def shard(module: Any, layers: Iterable[Any], ranks: Ranks, how: Sharding) -> None:
    """Shard a module over the ranks, in place, and make its parameters fp32 (`_make_masters`).

    Its `layers` are gathered one at a time, all other parameters together while `module` runs. A
    single process without mixed precision or offload only moves the module to its device.
    Parameters on the device `meta` get memory for this rank's part, not yet filled."""
    check_layout(how, ranks.world, module.model)
    layers = list(layers)
    for layer in layers:
        if how.compile:
            compile_layer(layer)
        if how.activation_checkpointing:
            recompute(layer)
    if ranks.world > 1 or how.mixed_precision or how.cpu_offload:
        mesh = ranks.mesh or ranks.make_mesh(
            how.replicas, how.tensor_parallel, how.sequence_parallel
        )
        if how.tensor_parallel > 1:
            divide(module.model, mesh["tensor"])
            mesh = mesh["replicate", "shard"]
        precision = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if how.mixed_precision
            else MixedPrecisionPolicy()
        )
        offload = OffloadPolicy()
        if how.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        policies: Any = {"mp_policy": precision, "offload_policy": offload}
        if how.expert_parallel and mesh["shard"].size() > 1:
            divide_experts(layers, mesh, **policies)
        # Inner modules first: each call takes the parameters that no earlier one has.
        for each in (*layers, module):
            fsdp2(each, mesh=mesh, **policies)
        _make_masters(module, how)  # only now, so that a rank never holds it all in fp32
        _allocate(module, torch.device("cpu") if how.cpu_offload else ranks.device)
    else:
        module.float()
        _allocate(module, ranks.device)
        module.to(ranks.device)


def check_layout(how: Sharding, ranks: int, model: Any, table: str = "trainer") -> None:
    """Raise `UserError` for settings that do not divide the ranks, or each other's work.

    `table`: the one that they stand in, for the sentence."""
    plain = Sharding()
    used = {each for each in how.__struct_fields__ if getattr(how, each) != getattr(plain, each)}
    for one, other in APART:
        if {one, other} <= used:
            raise UserError(f"{table}.{one} cannot be used with {table}.{other}; omit one")
    copy = ranks // max(1, how.replicas)
    for name, what, count in (
        ("replicas", "ranks", ranks),
        ("tensor_parallel", "ranks of a copy of the policy", copy),
        ("sequence_parallel", "ranks", ranks),
    ):
        given = getattr(how, name)
        if given < 1 or count % given:
            raise UserError(f"{table}.{name} is {given}, which does not divide the {count} {what}")
    heads = getattr(model.config.get_text_config(), "num_attention_heads", ranks)
    if how.sequence_parallel > heads:
        raise UserError(
            f"{table}.sequence_parallel is {how.sequence_parallel}, which is more than the "
            f"model's {heads} attention heads"
        )


def _make_masters(module: Any, how: Sharding) -> None:
    """Make the parameters fp32. Under mixed precision frozen ones beside trained ones keep their
    dtype: they are computed with in bf16 anyway."""
    is_trained = {parameter.requires_grad for parameter in module.parameters()}
    if not how.mixed_precision or len(is_trained) < 2:
        module.float()
    else:
        module._apply(lambda each: each.float() if each.requires_grad else each)


def recompute(layer: Any) -> None:
    """Have a layer keep only its inputs for the backward pass."""
    layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def _allocate(module: Any, device: torch.device) -> None:
    """Give memory on `device` to parameters on `meta`; tied ones stay tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=device)
                made[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
            each._parameters[name] = made[id(parameter)]


def rest(module: Any) -> None:
    """Free parameters gathered by a pass without gradient, so that weights can be assigned."""
    if isinstance(module, FSDPModule):
        module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole parameter, on every rank: a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compile_layer(layer: Any) -> None:
    """Have a layer run compiled, in place; it is compiled at its first pass.

    Sizes are symbols from the beginning: passes differ in rows and tokens, and each new size would
    compile again. Compiled code takes other kernels, so results differ by rounding."""
    layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raise `UserError` if torch.compile cannot make code for this device."""
    reason = ""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            reason = "Triton cannot compile for this GPU"
    else:
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            reason = "no C++ compiler was found (g++ or clang++)"
    if reason:
        raise UserError(f"trainer.compile: {reason}; install it, or omit the setting")


def divide_experts(layers: list[Any], mesh: DeviceMesh, **fsdp: Any) -> None:
    """Divide the experts of each layer over the ranks of a copy, in place; raises `UserError`.

    Tokens travel to the ranks of their experts and back, by transformers' dispatch. So the experts'
    weights, most of a mixture, are never gathered; every other weight is, as without this.
    `mesh` is that of `Ranks.make_mesh`. FSDP2, with the options `fsdp`, shards each rank's experts
    over the copies."""
    found = [
        layer.mlp.experts for layer in layers if hasattr(getattr(layer, "mlp", None), "experts")
    ]
    ranks = mesh["shard"].size()
    if not found:
        raise UserError("trainer.expert_parallel is on, and the model has no experts; omit it")
    for experts in found:
        if experts.num_experts % ranks:
            raise UserError(
                f"trainer.expert_parallel is on, and the model's {experts.num_experts} experts "
                f"cannot be divided over the {ranks} ranks of a copy; omit it"
            )
        for name, weight in list(experts.named_parameters(recurse=False)):
            part = distribute_tensor(weight.data, mesh["shard"], [Shard(0)])
            experts._parameters[name] = nn.Parameter(part, weight.requires_grad)
        experts.num_experts //= ranks
        EpDispatchExpertsParallel().install_forward(experts, mesh["shard"])
        fsdp2(experts, mesh=mesh["replicate"], **fsdp)
        # A rank's gradients are sums over the tokens of its whole copy.
        experts.set_gradient_divide_factor(float(mesh.size()))
        copies = mesh["replicate"]
        if copies.size() > 1 and dist.get_backend(copies.get_group()) != "nccl":
            experts.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it sums
