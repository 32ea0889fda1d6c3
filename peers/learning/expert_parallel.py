"""Expert parallelism: each rank of a copy of the policy keeps its own experts of every layer.

Tokens travel to the ranks of their experts and back, by transformers' dispatch. So the experts'
weights, most of a mixture, are never gathered; every other weight is, as without this.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.tensor_parallel import EpDispatchExpertsParallel

from swarm.errors import UserError


def divide_experts(layers: list[Any], mesh: DeviceMesh, **fsdp: Any) -> None:
    """Divide the experts of each layer over the ranks of a copy, in place; raises `UserError`.

    `mesh` is that of `Ranks.make_mesh`. FSDP2, with the options `fsdp`, shards each rank's experts
    over the copies.
    """
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
        fully_shard(experts, mesh=mesh["replicate"], **fsdp)
        # A rank's gradients are sums over the tokens of its whole copy.
        experts.set_gradient_divide_factor(float(mesh.size()))
        copies = mesh["replicate"]
        if copies.size() > 1 and dist.get_backend(copies.get_group()) != "nccl":
            experts.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it sums
