"""Tensor parallelism: each layer's matrices are divided over neighbouring ranks.

The division is transformers' own plan for the model. The parts of a matrix stay on their ranks, so
a layer's weights are never gathered over them; instead the ranks add up two sums of hidden states
per layer. All ranks that divide a matrix compute the same sequences.
"""

from __future__ import annotations

import fnmatch
from typing import Any

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
    config = model.config
    ranks = mesh.size()
    counts = {"attention heads": config.num_attention_heads}
    counts["key/value heads"] = config.num_key_value_heads
    for what, count in counts.items():
        if count % ranks:
            raise UserError(
                f"trainer.tensor_parallel is {ranks}, which does not divide the model's "
                f"{count} {what}"
            )
    parallelize_module(model.base_model, mesh, _plan(model))


def _plan(model: Any) -> dict[str, ParallelStyle]:
    """How each module is divided, by its name or pattern; raises `UserError`."""
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
