"""Sharding of a policy over ranks by FSDP2, with mixed precision, checkpointing and offload.

Parameters stay in fp32: they are the master weights that AdamW steps. Mixed precision only changes
the dtype of gathering and computing. Several replicas (`Ranks.make_mesh`) make it HSDP.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from peers.trainer.learning.ranks import Ranks
from swarm.jobs.training import Sharding


def shard(module: Any, layers: Iterable[Any], ranks: Ranks, how: Sharding) -> None:
    """Shard a module over the ranks, in place, and make its parameters fp32.

    Its `layers` are gathered one at a time, all other parameters together while `module` runs. A
    single process without mixed precision or offload only moves the module to its device.
    """
    layers = list(layers)
    if how.activation_checkpointing:
        for layer in layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if ranks.world > 1 or how.mixed_precision or how.cpu_offload:
        mesh = ranks.mesh or ranks.make_mesh(how.replicas)
        precision = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if how.mixed_precision
            else MixedPrecisionPolicy()
        )
        offload = OffloadPolicy()
        if how.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        for each in (*layers, module):
            fsdp2(each, mesh=mesh, mp_policy=precision, offload_policy=offload)
    else:
        module.to(ranks.device)
    module.float()  # only now, so that a rank never holds the whole policy in fp32


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


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part, laid out as `like`, of a full tensor that every rank holds."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(
        full.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    ).to_local()
