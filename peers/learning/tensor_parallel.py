"""Tensor parallelism: each layer's matrices are divided over neighbouring ranks.

The division is transformers' own plan for the model. The parts of a matrix stay on their ranks, so
a layer's weights are never gathered over them; instead the ranks add up two sums of hidden states
per layer. All ranks that divide a matrix compute the same sequences."""

import fnmatch
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from swarm.errors import UserError

HEADS_DIMENSION = 2
"""Of the inputs of a norm over each head: [rows, tokens, heads, head size]."""


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Divide the layers' matrices over the ranks of `mesh`, in place; raises `UserError`."""
    parallelize_module(model.base_model, mesh, _plan(model, mesh.size()))


def divide_blank(model: Any, ranks: int) -> None:
    """Cut a blank model's matrices down to one rank's part, in place; raises `UserError`."""
    styles = _plan(model, ranks)
    for name, module in model.base_model.named_modules():
        style = next((styles[each] for each in styles if fnmatch.fnmatch(name, each)), None)
        if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
            continue  # on every rank
        dimension = int(isinstance(style, RowwiseParallel))
        for key, parameter in list(module.named_parameters(recurse=False)):
            if dimension >= parameter.ndim:
                continue  # the bias of a sum over the ranks
            shape = list(parameter.shape)
            shape[dimension] //= ranks
            part = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            module._parameters[key] = torch.nn.Parameter(part)


def _plan(model: Any, ranks: int) -> dict[str, ParallelStyle]:
    """How each module is divided over ranks, by its name or pattern; raises `UserError`."""
    config = model.config.get_text_config()
    counts = {"attention heads": config.num_attention_heads}
    counts["key/value heads"] = config.num_key_value_heads
    for what, count in counts.items():
        if count % ranks:
            raise UserError(
                f"trainer.tensor_parallel is {ranks}, which does not divide the model's "
                f"{count} {what}"
            )
    names = [name for name, _ in model.base_model.named_modules()]
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in (type(model.config).base_model_tp_plan or {}).items():
        if not fnmatch.filter(names, pattern):
            continue
        if style == "colwise":
            plan[pattern] = ColwiseParallel()
        elif style == "rowwise":
            plan[pattern] = RowwiseParallel()
        elif style == "replicated_with_grad_allreduce":  # a norm over each head
            plan[pattern] = SequenceParallel(sequence_dim=HEADS_DIMENSION, use_local_output=True)
        else:
            plan = {}
            break
    if not plan:
        raise UserError(
            f"trainer.tensor_parallel: models of the family {model.config.model_type} cannot be "
            "divided; omit it"
        )
    return plan
