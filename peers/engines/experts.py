"""The two forms of a mixture's weights: each expert by itself, and all of a layer in one tensor.

Published checkpoints hold `mlp.experts.3.gate_proj.weight` and so on; transformers and the decoder
compute with `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_ONE = re.compile(r"(.+\.mlp\.experts)\.(\d{1,4})\.(gate|up|down)_proj\.weight")
_PARTS = ("gate", "up", "down")


def fused_names(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[list[str]]]:
    """Published tensors' names by fused one; experts that differ or skip a number stay single."""
    layers: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for name in shapes:
        match = _ONE.fullmatch(name)
        if match is not None:
            layers[match[1]][int(match[2]), match[3]] = name
    found = {}
    for at, names in layers.items():
        count = len(names) // 3
        whole = names.keys() == {(index, part) for index in range(count) for part in _PARTS}
        forms = {(part == "down", tuple(shapes[name])) for (_, part), name in names.items()}
        if whole and len(forms) == 2:
            found[f"{at}.gate_up_proj"] = [
                [names[index, "gate"], names[index, "up"]] for index in range(count)
            ]
            found[f"{at}.down_proj"] = [[names[index, "down"]] for index in range(count)]
    return found


def fuse_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All of a layer's experts in one tensor; other weights stay. Takes them out of `weights`."""
    fused = fused_names({name: weight.shape for name, weight in weights.items()})
    for name, experts in fused.items():
        weights[name] = torch.stack(
            [torch.cat([weights.pop(part) for part in parts]) for parts in experts]
        )
    return weights
