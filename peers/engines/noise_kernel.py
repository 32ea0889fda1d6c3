"""Sampling noise on a GPU as one fused kernel (Triton).

The kernel hashes counters with Philox4x32-10 and turns the words into Gumbel noise in registers.
The operations of `peers.engines.sampling` would write some hundred tensors of 64-bit words instead.
The hashed words are the same; a logarithm may differ in its last bits, as between two GPUs.

`noise_kernel` gives the kernel only where it is installed and agrees with those operations. It was
never run on a GPU; the tests run it in Triton's interpreter where Triton is installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

Noise = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(keys int64 [n, 2], rows [n], positions [n], vocabulary size) → fp32 noise [n, vocabulary]."""

TOLERANCE = 1e-4
"""Largest difference from the reference. Noise has the scale 1, and thresholds begin at 2e-4."""

BLOCK = 256
"""Counters of one program; each gives the noise of four tokens."""


@functools.cache
def noise_kernel(device: torch.device, reference: Noise) -> Noise | None:
    """The kernel for a device; None if Triton is missing, fails or disagrees with `reference`."""
    try:
        kernel = make_kernel()
        rows, positions = torch.tensor([[0, 3, 2**20], [0, 7, 2**16 + 1]], device=device)
        keys = torch.tensor([[0xFFFFFFFF, 0x80000001], [0, 1], [2**31, 16]], device=device)
        for size in (5, 4 * BLOCK + 2):
            given = (keys, rows, positions, size)
            if not torch.allclose(kernel(*given), reference(*given), atol=TOLERANCE, rtol=0):
                return None
    except Exception:  # Triton needs a driver, a compiler and a device that it knows
        return None
    return kernel


def make_kernel(words: bool = False) -> Noise:
    """Compile the kernel; raises `ImportError` without Triton.

    With `words` it gives the hashed words as fp32, before any logarithm: tests compare their bits.
    """
    triton = importlib.import_module("triton")
    compiled = triton.jit(_gumbel)

    def noise(keys: Tensor, rows: Tensor, positions: Tensor, vocabulary_size: int) -> Tensor:
        found = torch.empty(len(rows), vocabulary_size, device=rows.device)
        if not len(rows):
            return found
        grid = (len(rows), -(-vocabulary_size // (4 * BLOCK)))
        # Triton launches on the current device, whichever holds the tensors.
        with torch.cuda.device(rows.device) if rows.is_cuda else nullcontext():
            compiled[grid](keys, rows, positions, found, vocabulary_size, BLOCK=BLOCK, WORDS=words)
        return found

    return noise


try:
    tl: Any = importlib.import_module("triton.language")
except ImportError:
    tl = Any  # only the annotation below needs it


def _gumbel(  # type: ignore[no-untyped-def]
    keys,
    rows,
    positions,
    found,
    vocabulary_size,
    BLOCK: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
):
    """One row's noise of 4 · BLOCK tokens; see `peers.engines.sampling.gumbel_noise`."""
    row = tl.program_id(0)
    quad = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word_0 = quad.to(tl.uint32)
    zero = word_0 * 0
    word_1 = zero + tl.load(positions + row).to(tl.uint32)
    word_2 = zero + tl.load(rows + row).to(tl.uint32)
    word_3 = zero
    low = zero + tl.load(keys + 2 * row).to(tl.uint32)
    high = zero + tl.load(keys + 2 * row + 1).to(tl.uint32)
    for _ in tl.static_range(10):
        before_0 = word_0
        before_2 = word_2
        word_0 = tl.umulhi(before_2, zero + 0xCD9E8D57) ^ word_1 ^ low
        word_2 = tl.umulhi(before_0, zero + 0xD2511F53) ^ word_3 ^ high
        word_1 = before_2 * (zero + 0xCD9E8D57)
        word_3 = before_0 * (zero + 0xD2511F53)
        low = low + (zero + 0x9E3779B9)
        high = high + (zero + 0xBB67AE85)
    for index in tl.static_range(4):
        word = word_0
        if index == 1:
            word = word_1
        if index == 2:
            word = word_2
        if index == 3:
            word = word_3
        uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        # log1p(−v), which Triton lacks: exact where 1 − v rounds to 1, else log u · v / (1 − u).
        rest = 1.0 - uniform
        ratio = uniform / tl.where(rest == 1.0, 1.0, 1.0 - rest)
        exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * ratio)
        result = -tl.log(exponential)
        if WORDS:
            result = word.to(tl.float32)
        token = quad * 4 + index
        tl.store(
            found + row.to(tl.int64) * vocabulary_size + token,
            result,
            mask=token < vocabulary_size,
        )
