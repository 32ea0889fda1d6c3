"""The ways to compute sampling noise agree: numpy, torch and, where it is installed, Triton."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from peers.engines.noise_kernel import TOLERANCE, make_kernel, noise_kernel
from peers.engines.sampling import gumbel_noise, keyed_noise, noise_by_torch, philox

KEY = (0xFFFFFFFF, 0x80000001)
KEYS = torch.tensor([KEY] * 3)
ROWS = torch.tensor([0, 3, 2**20])
POSITIONS = torch.tensor([0, 7, 2**16 + 1])
SIZES = [1, 5, 64, 1026, 40_000]


def hashed_words(keys: Tensor, rows: Tensor, positions: Tensor, size: int) -> Tensor:
    """The words behind the noise, as fp32 [n, size]."""
    quads = torch.arange(-(-size // 4))
    counter = (quads, positions[:, None], rows[:, None], torch.zeros(1, dtype=torch.int64))
    words = philox((keys[:, :1], keys[:, 1:]), counter)
    return torch.stack(words, dim=-1).flatten(-2)[:, :size].to(torch.float32)


def test_rows_may_have_keys_of_their_own() -> None:
    keys = torch.tensor([KEY, (0, 1), (2**31, 16)])
    found = keyed_noise(keys, ROWS, POSITIONS, 9)
    for index, (low, high) in enumerate(keys.tolist()):
        alone = gumbel_noise((low, high), ROWS[index], POSITIONS[index], 9)
        assert torch.equal(found[index], alone)


@pytest.mark.parametrize("size", SIZES)
def test_numpy_equals_torch(size: int) -> None:
    found = gumbel_noise(KEY, ROWS, POSITIONS, size)
    assert torch.equal(found, noise_by_torch(KEYS, ROWS, POSITIONS, size))
    cube = gumbel_noise(KEY, ROWS[:, None], POSITIONS, size)
    assert cube.shape == (3, 3, size) and torch.equal(cube[[0, 1, 2], [0, 1, 2]], found)
    assert gumbel_noise(KEY, ROWS[:0], POSITIONS[:0], size).shape == (0, size)


def test_a_device_without_the_kernel_falls_back() -> None:
    assert noise_kernel(torch.device("cpu"), lambda *_: torch.full((3, 5), torch.nan)) is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("size", SIZES[:-1])
def test_triton_equals_torch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    keys = torch.tensor([KEY, (0, 1), (2**31, 16)])
    found = make_kernel()(keys, ROWS, POSITIONS, size)
    torch.testing.assert_close(
        found, noise_by_torch(keys, ROWS, POSITIONS, size), atol=TOLERANCE, rtol=0
    )
    words = make_kernel(words=True)(keys, ROWS, POSITIONS, size)
    assert torch.equal(words, hashed_words(keys, ROWS, POSITIONS, size))
