"""The largest sums of logits and noise on a CPU, with noise only for tokens that can win.

A token wins by its noise or by its logit. First, noise is computed for the tokens whose hashed word
lies below a limit, about √vocabulary of them; the best of these is a floor. All other tokens have
less noise than the limit gives, so only those with a logit above floor − that noise can still win,
and their noise is computed second. The first tokens are a random sample, and few logits are above
the largest of a random sample: about √vocabulary again, whatever the logits are.

The results are those of noise for all tokens, bit for bit: noise depends on nothing but its key,
row, position and token."""

import ctypes
import functools
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peers.engines.noise import Drawn, gumbel_of, hash_quads

Tokens = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

Search = Callable[[tuple[int, int], int, int, int, int], tuple[Tokens, Words]]
"""(key, row, position, vocabulary size, limit) → tokens in ascending order, and their words."""

COMPILE_SECONDS_MAX = 60.0
"""Time given to the compiler; it needs half a second."""

SOURCE = Path(__file__).with_name("search.c").read_text(encoding="utf-8")


@functools.cache
def find_search() -> Search | None:
    """The search for tokens with much noise, whose hashed word is at most a limit, compiled for
    this machine; None without a compiler, or if its words are wrong.

    Hashing all words in numpy costs more than the rest of the noise; in C every word is hashed in
    registers, ten times as fast. The library's file is deleted once it is loaded."""
    try:
        search = _compile()
    except (OSError, subprocess.SubprocessError):
        return None
    given = ((0xFFFFFFFF, 0x80000001), 2**20, 2**16 + 1, 4099, 1 << 29)
    (tokens, words), (tokens_known, words_known) = search(*given), search_by_numpy(*given)
    same = np.array_equal(tokens, tokens_known) and np.array_equal(words, words_known)
    return search if same else None


def search_by_numpy(
    key: tuple[int, int], row: int, position: int, size: int, limit: int
) -> tuple[Tokens, Words]:
    """A `Search` that costs as much as noise for all tokens: what a compiled one is checked by."""
    quads = np.arange(-(-size // 4), dtype=np.uint64)
    words = np.stack(hash_quads(key, quads, np.uint64(position), np.uint64(row)), axis=-1)
    flat = words.reshape(-1)[:size]
    tokens = np.flatnonzero(flat <= np.uint64(limit))
    return tokens, flat[tokens].astype(np.uint32)


def _compile() -> Search:
    """Compile the search; raises `OSError` or `SubprocessError` where that is not possible."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("cc")
    with tempfile.TemporaryDirectory(prefix="swarm-search-") as folder:
        source, library = Path(folder, "search.c"), Path(folder, "search.so")
        source.write_text(SOURCE, encoding="utf-8")
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(library), str(source)]
        for options in (["-march=native"], []):
            done = subprocess.run(
                [*command, *options],
                capture_output=True,
                timeout=COMPILE_SECONDS_MAX,
                stdin=subprocess.DEVNULL,
                check=not options,
            )
            if done.returncode == 0:
                break
        function = ctypes.CDLL(str(library)).search
    words = [ctypes.c_uint32] * 4
    function.argtypes = [*words, ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int64

    def search(
        key: tuple[int, int], row: int, position: int, size: int, limit: int
    ) -> tuple[Tokens, Words]:
        tokens = np.empty(size, dtype=np.int64)  # pages that are not written take no memory
        found = np.empty(size, dtype=np.uint32)
        count = function(*key, row, position, size, limit, tokens.ctypes.data, found.ctypes.data)
        return tokens[:count].copy(), found[:count].copy()

    return search


VOCABULARY_MIN = 1 << 13
"""Smallest vocabulary for which this costs less than noise for all tokens."""

SLACK = 1e-3
"""What noise and sums may be off by rounding: noise has few digits more than this, and sums of
larger logits are given `SLACK_SHARE` of their size."""
SLACK_SHARE = 2.0**-22

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


class _Entries(NamedTuple):
    """Perturbed logits of some tokens, in ascending order of rows."""

    rows: Indices
    tokens: Indices
    values: Floats


def pays(logits: Tensor) -> bool:
    """Whether `largest` costs less than noise for all tokens: not on a GPU (one kernel computes it
    there), for a small vocabulary, or without a compiler."""
    large = logits.device.type == "cpu" and logits.shape[-1] >= VOCABULARY_MIN
    return large and find_search() is not None


def largest(scaled: Tensor, drawn: Drawn, count: int = 1) -> tuple[Tensor, Tensor]:
    """Values fp32 and token ids int64 [n, count] of the largest perturbed logits, in order.

    `scaled` are fp32 logits over the temperature [n, vocabulary] on the CPU. Of equal ones the
    smallest token is first."""
    logits = scaled.numpy()
    limit = int(2.0**32 / math.sqrt(logits.shape[1]))
    noise_max = float(gumbel_of(torch.tensor([float(limit)])))
    noisy = _noisy(logits, drawn, limit)
    floors = np.full(len(logits), -np.inf)
    ends = np.searchsorted(noisy.rows, np.arange(len(logits) + 1))
    for row, (start, end) in enumerate(pairwise(ends)):
        if end - start >= count:
            floors[row] = np.partition(noisy.values[start:end], -count)[-count]
    near = _near(logits, drawn, limit, floors - noise_max)
    # Without `count` noisy tokens a row has no floor: all its other tokens are near.
    rows = np.concatenate((noisy.rows, near.rows))
    tokens = np.concatenate((noisy.tokens, near.tokens))
    values = np.concatenate((noisy.values, near.values))
    # Not `>=`: with NaN among its logits a row must keep `count` entries as well, or `first` would
    # point into the next row.
    high = np.flatnonzero(~(values < floors[rows]))
    high = high[np.lexsort((tokens[high], -values[high], rows[high]))]
    first = np.searchsorted(rows[high], np.arange(len(logits)))
    chosen = high[first[:, None] + np.arange(count)]
    return torch.from_numpy(values[chosen]), torch.from_numpy(tokens[chosen])


@dataclass(frozen=True)
class Judgement:
    """How well a worker's claimed tokens agree with a validator's own logits."""

    margin: Tensor
    """fp32 [n], ≥ 0: the largest perturbed logit minus the claimed token's, in units of the
    noise's scale (1 = a factor e of probability). 0: the claimed token is the argmax."""
    gap: Tensor
    """fp32 [n], ≥ 0: the largest perturbed logit minus the second largest."""
    log_probability: Tensor
    """fp32 [n]: log μ of the claimed token at this temperature, without noise."""


def judge_margins(logits: Tensor, tokens: Tensor, temperature: float, noise: Tensor) -> Judgement:
    """Token-DiFR's margins of tokens int64 [n] under logits and noise, fp32 [n, vocabulary]."""
    scaled = logits.float() / temperature
    perturbed = scaled + noise
    index = tokens[:, None]
    best, which = perturbed.max(-1, keepdim=True)
    margin = (best - perturbed.gather(-1, index))[:, 0]
    second = perturbed.scatter_(-1, which, -torch.inf).amax(-1)
    return Judgement(
        margin=margin,
        gap=best[:, 0] - second,
        log_probability=torch.log_softmax(scaled, dim=-1).gather(-1, index)[:, 0],
    )


def margins(
    logits: Tensor, tokens: Tensor, temperature: float, drawn: Drawn, *, scored: bool = True
) -> Judgement:
    """As `judge_margins`; without `scored` log-probabilities may be left out."""
    if not pays(logits):
        return judge_margins(logits, tokens, temperature, drawn.noise(logits.shape[-1]))
    scaled = logits.float() / temperature
    best, second = largest(scaled, drawn, 2)[0].unbind(-1)
    rows = np.arange(len(scaled))
    hashes = _hash(drawn, rows, tokens.numpy())
    claimed = _perturb(scaled.numpy(), rows, tokens.numpy(), hashes)
    return Judgement(
        margin=best - torch.from_numpy(claimed.values),
        gap=best - second,
        log_probability=scaled.gather(-1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)
        if scored
        else torch.zeros(len(scaled)),
    )


def _noisy(logits: Floats, drawn: Drawn, limit: int) -> _Entries:
    """The tokens whose word is at most the limit."""
    search, size = find_search() or search_by_numpy, logits.shape[1]
    found = [
        search(drawn.key, row, position, size, limit)
        for row, position in zip(drawn.rows.tolist(), drawn.positions.tolist(), strict=True)
    ]
    rows = np.repeat(np.arange(len(found)), [len(tokens) for tokens, _ in found])
    tokens, hashes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return _perturb(logits, rows, tokens, hashes)


def _near(logits: Floats, drawn: Drawn, limit: int, floors: npt.NDArray[np.float64]) -> _Entries:
    """The other tokens whose logits are not below their row's floor."""
    # Too many tokens cost a little time, one too few would make another token win. So the floor is
    # lowered by what sums may be off, and rounded to fp32 downwards.
    floors = floors - SLACK - SLACK_SHARE * np.abs(floors)
    least = np.nextafter(floors.astype(np.float32), np.float32(-np.inf))
    rows, tokens = np.divmod(np.flatnonzero(logits >= least[:, None]), logits.shape[1])
    hashes = _hash(drawn, rows, tokens)
    other = np.flatnonzero(hashes > limit)  # else `_noisy` has them, and they would come twice
    return _perturb(logits, rows[other], tokens[other], hashes[other])


def _hash(drawn: Drawn, rows: Indices, tokens: Indices) -> npt.NDArray[np.uint64]:
    quads, words = np.divmod(tokens, 4)
    positions, numbers = (each.numpy()[rows] for each in (drawn.positions, drawn.rows))
    hashed = hash_quads(
        drawn.key, *(each.astype(np.uint64) for each in (quads, positions, numbers))
    )
    found: npt.NDArray[np.uint64] = np.choose(words, hashed)
    return found


def _perturb(
    logits: Floats, rows: Indices, tokens: Indices, hashes: npt.NDArray[np.unsignedinteger]
) -> _Entries:
    noise = gumbel_of(torch.from_numpy(hashes.astype(np.float32)))
    return _Entries(rows, tokens, logits[rows, tokens] + noise.numpy())
