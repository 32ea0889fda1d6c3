"""The noise of seeded Gumbel-max sampling: the worker does not choose its randomness.

A token is argmax(fp32 logits / T + Gumbel noise). The noise depends only on the submission's seed,
the row, the position and the token id, so anyone who can recompute the logits can recompute the
token. The noise comes from the counter-based generator Philox4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10

_BLOCK = 1 << 13
"""Counters hashed at once on a CPU: their words stay in its second-level cache."""


def philox(key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Philox4x32-10: four random words in [0, 2³²), int64, of four counter words that broadcast."""
    key_0, key_1 = key
    word_0, word_1, word_2, word_3 = counter
    for _ in range(_ROUNDS):
        # The product overflows int64, but its 64 bits are correct. The arithmetic shift copies
        # the sign bit into the upper half, so both halves are masked.
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0 = ((product_1 >> 32) & _MASK) ^ word_1 ^ key_0
        word_2 = ((product_0 >> 32) & _MASK) ^ word_3 ^ key_1
        word_1 = product_1 & _MASK
        word_3 = product_0 & _MASK
        key_0 = (key_0 + _WEYL_0) & _MASK
        key_1 = (key_1 + _WEYL_1) & _MASK
    return [word_0, word_1, word_2, word_3]


def gumbel_noise(
    key: tuple[int, int], rows: Tensor, positions: Tensor, vocabulary_size: int
) -> Tensor:
    """fp32 Gumbel noise [..., vocabulary_size] for int64 `rows` and `positions` that broadcast.

    `key` comes from `swarm.rollouts.seeds.noise_key`. A token's word h is word (token id mod 4) of
    the counter (token id // 4, position, row, 0). Then v = (float32(h) + 0.5)·2⁻³² and
    noise = −log(−log1p(−v)), all in fp32. So v may round to 1 (noise −∞: the token is never
    sampled) but never to 0 (noise +∞)."""
    shape = torch.broadcast_shapes(rows.shape, positions.shape)  # type: ignore[no-untyped-call]
    flat_rows, flat_positions = (each.expand(shape).reshape(-1) for each in (rows, positions))
    if rows.device.type == "cpu":
        found = _noise_by_numpy(key, flat_rows, flat_positions, vocabulary_size)
    else:
        found = _noise_by_torch(key, flat_rows, flat_positions, vocabulary_size)
    return found.view(*shape, vocabulary_size)


@dataclass(frozen=True)
class Drawn:
    """Where the noise of some rows comes from."""

    key: tuple[int, int]
    rows: Tensor
    """int64 [n]"""
    positions: Tensor
    """int64 [n]"""

    def noise(self, vocabulary_size: int) -> Tensor:
        """fp32 noise [n, vocabulary_size]."""
        return gumbel_noise(self.key, self.rows, self.positions, vocabulary_size)


def _noise_by_torch(
    key: tuple[int, int], rows: Tensor, positions: Tensor, vocabulary_size: int
) -> Tensor:
    """Reads no number on the host, so that a GPU's queue goes on."""
    quads = torch.arange(-(-vocabulary_size // 4), device=rows.device)
    zero = torch.zeros_like(quads[:1])
    words = philox(key, (quads, positions[:, None], rows[:, None], zero))
    hashes = torch.stack(words, dim=-1).flatten(-2)[:, :vocabulary_size]
    return gumbel_of(hashes.to(torch.float32))


def _noise_by_numpy(
    key: tuple[int, int], rows: Tensor, positions: Tensor, vocabulary_size: int
) -> Tensor:
    hashes = _hashes(key, rows.numpy(), positions.numpy(), vocabulary_size)
    return gumbel_of(torch.from_numpy(hashes)[:, :vocabulary_size])


def gumbel_of(words: Tensor) -> Tensor:
    """Noise of hashed words given as fp32, which it replaces."""
    uniform = words.add_(0.5).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _hashes(
    key: tuple[int, int],
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    vocabulary_size: int,
) -> npt.NDArray[np.float32]:
    """The words of `philox` as fp32 [n, 4 · ⌈vocabulary / 4⌉], for counters of noise on a CPU.

    numpy's operations cost a third of torch's, shift without signs and write in place."""
    quads = np.arange(-(-vocabulary_size // 4), dtype=np.uint64)
    word_1, word_2 = (each.astype(np.uint64)[:, None] for each in (positions, rows))
    found = np.empty((len(rows), len(quads), 4), dtype=np.float32)
    some = max(1, _BLOCK // len(quads))
    for first in range(0, len(rows), some):
        for start in range(0, len(quads), _BLOCK):
            part, block = slice(first, first + some), slice(start, start + _BLOCK)
            words = hash_quads(key, quads[block], word_1[part], word_2[part])
            for index, word in enumerate(words):
                found[part, block, index] = word
    return found.reshape(len(rows), 4 * len(quads))


def hash_quads(
    key: tuple[int, int],
    word_0: npt.NDArray[np.uint64],
    word_1: npt.NDArray[np.uint64] | np.uint64,
    word_2: npt.NDArray[np.uint64] | np.uint64,
) -> tuple[npt.NDArray[np.uint64], ...]:
    """`philox` of counters whose last word is 0, in numpy; the words broadcast together."""
    shape = np.broadcast_shapes(np.shape(word_0), np.shape(word_1), np.shape(word_2))
    words = tuple(np.empty(shape, dtype=np.uint64) for _ in range(4))
    w0, w1, w2, w3 = words
    w0[:], w1[:], w2[:], w3[:] = word_0, word_1, word_2, 0
    product_0, product_1 = np.empty_like(w0), np.empty_like(w0)
    half, low = np.uint64(32), np.uint64(_MASK)
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        np.multiply(w0, np.uint64(_MULTIPLIER_0), out=product_0)
        np.multiply(w2, np.uint64(_MULTIPLIER_1), out=product_1)
        w1 ^= np.uint64(key_0)
        np.right_shift(product_1, half, out=w0)
        w0 ^= w1
        w3 ^= np.uint64(key_1)
        np.right_shift(product_0, half, out=w2)
        w2 ^= w3
        np.bitwise_and(product_1, low, out=w1)
        np.bitwise_and(product_0, low, out=w3)
        key_0, key_1 = (key_0 + _WEYL_0) & _MASK, (key_1 + _WEYL_1) & _MASK
    return words
