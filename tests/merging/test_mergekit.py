"""TIES against mergekit 0.1.5, where it is installed: an independent implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peers.merging import methods

mergekit: Any = pytest.importorskip("mergekit.merge_methods", reason="pip install mergekit==0.1.5")


@pytest.mark.parametrize("density", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 3.0], [0.2, 0.5, 0.3]])
def test_ties_gives_the_tensors_of_mergekit(density: float, weights: list[float]) -> None:
    """Both keep the same values where the density times the size is whole, and no values tie."""
    draw = torch.Generator().manual_seed(len(weights))
    base = torch.randn(40, 30, generator=draw)
    tensors = [base + torch.randn(40, 30, generator=draw) for _ in weights]
    ours = methods.ties(base, [each.clone() for each in tensors], weights, density, 0.7)
    group = mergekit.TensorGroup.from_tensors([base, *tensors], base_index=0)
    given = {
        "density": dict(enumerate([density] * len(weights), 1)),
        "weight": dict(enumerate(weights, 1)),
        "normalize": True,
        "rescale": False,
        "int8_mask": False,
        "lambda": 0.7,
    }
    theirs = mergekit.get("ties").merge_group(group, **given)
    torch.testing.assert_close(ours, theirs)
