"""The ways to compute sampling noise agree: numpy, torch and, where it is installed, Triton."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from peers.engines.noise_kernel import TOLERANCE, make_kernel, noise_kernel
from peers.engines.sampling import gumbel_noise, noise_by_torch

KEY = (0xFFFFFFFF, 0x80000001)
ROWS = torch.tensor([0, 3, 2**20])
POSITIONS = torch.tensor([0, 7, 2**16 + 1])
SIZES = [1, 5, 64, 1026, 40_000]


@pytest.mark.parametrize("size", SIZES)
def test_numpy_equals_torch(size: int) -> None:
    found = gumbel_noise(KEY, ROWS, POSITIONS, size)
    assert torch.equal(found, noise_by_torch(KEY, ROWS, POSITIONS, size))
    cube = gumbel_noise(KEY, ROWS[:, None], POSITIONS, size)
    assert cube.shape == (3, 3, size) and torch.equal(cube[[0, 1, 2], [0, 1, 2]], found)
    assert gumbel_noise(KEY, ROWS[:0], POSITIONS[:0], size).shape == (0, size)


def test_a_device_without_the_kernel_falls_back() -> None:
    assert noise_kernel(torch.device("cpu"), lambda *_: torch.full((3, 5), torch.nan)) is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("size", SIZES[:-1])
def test_triton_equals_torch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    found = make_kernel()(KEY, ROWS, POSITIONS, size)
    torch.testing.assert_close(
        found, noise_by_torch(KEY, ROWS, POSITIONS, size), atol=TOLERANCE, rtol=0
    )
