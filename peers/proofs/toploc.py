"""TOPLOC proofs: 258 bytes that bind 32 tokens to the hidden states they were sampled from.

The scheme is that of "TOPLOC: A Locality Sensitive Hashing Scheme for Trustless Verifiable
Inference" (arXiv 2501.16007), and the bytes are those of the toploc package. Take the final-norm
hidden states of 32 tokens in bf16, flattened; take the 128 entries largest in magnitude; take the
largest modulus m ≤ 65497 that keeps their indices distinct; the proof is m and the polynomial over
GF(65497) through the points (index mod m, bf16 bit pattern), as 2 + 128 · 2 bytes, big endian,
constant coefficient first. A verifier recomputes the hidden states, evaluates the polynomial at
its own 128 largest entries and compares: rounding differs a little, other weights differ a lot.

Unlike the package, this module compares signs, binds the modulus, checks every proof's format
before any arithmetic, and processes all chunks at once.

The modulus must be bound because a free one makes a proof that fits every text. Modulo a multiple
of the hidden width, an index keeps its dimension and loses its position; the largest entries lie in
a few dimensions that have one sign and nearly one size in every text, and a polynomial through
their usual values matches them all. Let m*(S) be the largest modulus ≤ 65497 that keeps the indices
S distinct. A superset never has a larger m*. So the builder's modulus m*(its 128 indices) is at
least m*(T) for every T that contains them: `verify` takes T from its own, slightly different
values, as the 512 largest. In a chunk of at most 65497 values that leaves 65497 alone, and
otherwise a few moduli just below it. Nothing else bounds it from above: a larger modulus makes
indices collide, and two entries with one residue share one value.

A proof does not show how tokens were drawn; seeded sampling does (`peers.engines.noise`)."""

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peers.proofs.format import CHUNK_TOKENS, PRIME, TOP_VALUES, check_format
from swarm.wire.manifest import Thresholds

SIGN_MISMATCHES_MAX = 3
"""Wrong signs among the entries whose exponents match; a threshold of our own.

Rounding never flips the sign of one of the largest entries. An honest mismatch comes from a top
entry of the verifier that is not among the proof's: it evaluates to noise, which matches the
exponent with the wrong sign in 1 of 512 cases. Even where 90 matching exponents are enough, which
leaves 38 such entries, four or more mismatches happen once in a million chunks."""


CANDIDATES = 4 * TOP_VALUES
"""Largest entries of a verifier among which it expects the builder's 128. In a Gaussian chunk of
131,072 values the 512th is 12 % smaller than the 128th: more than rounding moves an entry."""


@dataclass(frozen=True)
class ChunkResult:
    """How one proof compares with recomputed hidden states."""

    exponent_matches: int
    """Entries out of 128; 0 for a modulus that no honest builder takes."""
    mantissa_mean: float
    """Mean mantissa distance, 0 to 127, where exponents match; infinite when none does."""
    mantissa_median: float
    """Median of the same (the upper one of an even count, as in the toploc package)."""
    sign_mismatches: int
    """Entries with matching exponents and different signs."""
    error: float
    """Mean over the entries, 0 to 1, of 1 if exponent or sign differs, else of the mantissa
    distance over 128: about the relative error of a value."""
    accepted: bool


def chunk_rows(prompt_hidden: Tensor, completion_hidden: Tensor) -> list[Tensor]:
    """Cut a completion's bf16 hidden rows [n, hidden] into chunks [rows, hidden], one per proof.

    Of a completion that several policies sampled, each span is cut as if it were a completion: all
    rows are then of the span's policy, and the rows before it stand for the prompt's.

    Chunk c holds rows 32c to min(32c + 32, n). A chunk with fewer than 128 values is extended
    backwards, row by row, until it has at least 128: first with earlier rows of the completion,
    then with rows of the prompt. `prompt_hidden` [p, hidden] holds the rows just before the
    completion's row 0, oldest first (`Piece.prompt_hidden`: without the prompt's last
    position, which *is* row 0). Raises `ValueError` for an empty completion and for a sequence
    with fewer than 128 values in all."""
    count, width = completion_hidden.shape
    if count == 0:
        raise ValueError("a completion without tokens has no proof")
    rows_min = -(-TOP_VALUES // width)
    before = prompt_hidden[-rows_min:]
    sequence = torch.cat((before, completion_hidden))
    chunks = []
    for start in range(len(before), len(sequence), CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(sequence))
        first = min(start, end - rows_min)
        if first < 0:
            raise ValueError(
                f"a sequence of {end} rows of {width} values is too short for a proof, "
                f"which binds {TOP_VALUES}"
            )
        chunks.append(sequence[first:end])
    return chunks


def build(chunks: Sequence[Tensor]) -> list[bytes]:
    """One proof for each bf16 chunk [rows, hidden] with at least 128 values (`chunk_rows`)."""
    if not chunks:
        return []
    indices, patterns = _top_values(chunks)
    moduli = _injective_moduli(indices)
    coefficients = _interpolate(indices % moduli[:, None], patterns % PRIME)
    proofs = np.concatenate((moduli[:, None], coefficients), axis=1).astype(">u2")
    return [proof.tobytes() for proof in proofs]


def verify(
    chunks: Sequence[Tensor],
    proofs: Sequence[bytes],
    thresholds: Thresholds = Thresholds(),  # noqa: B008 (frozen)
) -> list[ChunkResult]:
    """Compare each proof with its chunk of recomputed hidden states.

    The published thresholds (arXiv 2501.16007 and INTELLECT-2, bf16) are 90 exponents, and
    mantissas that differ by at most 10 on average and 8 in the median. One call may verify the
    chunks of many completions, after `check_format` for each completion. Formats are checked here
    again. Raises `ProofFormatError`."""
    check_format(proofs, [CHUNK_TOKENS * len(chunks)])
    if not chunks:
        return []
    words = np.frombuffer(b"".join(proofs), dtype=">u2").reshape(len(proofs), -1).astype(np.int64)
    indices, own = _top_values(chunks)
    claimed = _evaluate(words[:, 1:], indices % words[:, :1])

    matches = (claimed >> 7) & 0xFF == (own >> 7) & 0xFF  # bf16: sign, 8 exponent bits, 7 mantissa
    # Modulo less than any honest builder takes, an index may lose its position in the chunk, and
    # then values that are usual in every text fit this one (decision 23): no entry counts.
    matches &= (words[:, 0] >= _least_moduli(chunks, words[:, 0]))[:, None]
    counts = matches.sum(1)
    flipped = (claimed >> 15 != own >> 15) & matches
    signs = flipped.sum(1)
    distances = np.abs((claimed & 0x7F) - (own & 0x7F))
    errors = np.where(matches & ~flipped, distances / 128, 1.0).mean(1)
    sums = np.where(matches, distances, 0).sum(1)
    # 128 is more than any distance of 7 bits: entries that do not match come after all others.
    ordered = np.sort(np.where(matches, distances, 128), axis=1)
    medians = ordered[np.arange(len(chunks)), np.minimum(counts // 2, TOP_VALUES - 1)]

    results = []
    for count, total, median, sign, error in zip(
        *(each.tolist() for each in (counts, sums, medians, signs, errors)), strict=True
    ):
        mean = total / count if count else float("inf")
        median = float(median) if count else float("inf")
        accepted = (
            count >= thresholds.proof_exponents_min
            and mean <= thresholds.proof_mantissa_mean_max
            and median <= thresholds.proof_mantissa_median_max
            and sign <= SIGN_MISMATCHES_MAX
        )
        results.append(ChunkResult(count, mean, median, sign, error, accepted))
    return results


Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def _least_moduli(chunks: Sequence[Tensor], claimed: Integers) -> Integers:
    """The least modulus that an honest builder can take for each chunk.

    Only a modulus below 65497 needs a look at the chunk's values."""
    least = np.full(len(chunks), PRIME, dtype=np.int64)
    for number in np.flatnonzero(claimed < PRIME).tolist():
        if chunks[number].numel() > PRIME:  # else all indices are distinct modulo 65497
            flat = chunks[number].reshape(-1).view(torch.int16)
            top = flat.bitwise_and(0x7FFF).topk(CANDIDATES, sorted=False).indices
            least[number] = _injective_moduli(top.cpu().numpy()[None])[0]
    return least


def _top_values(chunks: Sequence[Tensor]) -> tuple[Integers, Integers]:
    """(flat indices, bf16 bit patterns) [chunks, 128] of each chunk's largest magnitudes.

    Without the sign bit, bf16 patterns sort as integers in the order of their magnitudes. Ties at
    the 128th value break as in torch.topk on a CPU over the whole chunk, as in the toploc package.
    Chunks are therefore grouped by size, not padded. A verifier tolerates other choices of ties."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, chunk in enumerate(chunks):
        if chunk.dtype != torch.bfloat16:
            raise ValueError(f"hidden states must be bfloat16, these are {chunk.dtype}")
        if chunk.numel() < TOP_VALUES:
            raise ValueError(f"a chunk has {chunk.numel()} values, fewer than {TOP_VALUES}")
        groups[chunk.numel()].append(number)
    indices = np.empty((len(chunks), TOP_VALUES), dtype=np.int64)
    patterns = np.empty_like(indices)
    for size, numbers in groups.items():
        flat = [chunks[number].reshape(-1).view(torch.int16) for number in numbers]
        if flat[0].is_cpu and size > _SIFT_FROM:
            for number, bits in zip(numbers, flat, strict=True):
                indices[number] = _sifted_top(bits.numpy())
                patterns[number] = bits.numpy()[indices[number]]
        else:
            bits = torch.stack(flat)
            top = bits.bitwise_and(0x7FFF).topk(TOP_VALUES, dim=1, sorted=False).indices
            indices[numbers] = top.cpu().numpy()
            patterns[numbers] = bits.gather(1, top).cpu().numpy()
    return indices, patterns & 0xFFFF


_SIFT_FROM = 64 * TOP_VALUES
"""Values in a chunk above which torch.topk scans it with a heap of the largest values."""


def _sifted_top(bits: np.ndarray[tuple[int, ...], np.dtype[np.int16]]) -> Integers:
    """The indices that torch.topk gives for a large chunk, ties included, in a third of the time.

    A heap ignores every value that does not exceed its minimum, and its minimum never falls. So
    after the chunk's head, every value not above the head's 128th largest can be left out
    beforehand, and the heap still keeps the same values."""
    magnitudes = bits & 0x7FFF
    head = _SIFT_FROM // 2
    bound = np.partition(magnitudes[:head], head - TOP_VALUES)[head - TOP_VALUES]
    candidates = np.concatenate((np.arange(head), head + np.flatnonzero(magnitudes[head:] > bound)))
    values = np.full(max(len(candidates), _SIFT_FROM), -1, dtype=np.int16)
    values[: len(candidates)] = magnitudes[candidates]
    top = torch.from_numpy(values).topk(TOP_VALUES, sorted=False).indices.numpy()
    chosen: Integers = candidates[top]
    return chosen


def _injective_moduli(indices: Integers) -> Integers:
    """For each row, the largest m ≤ 65497 that keeps its indices distinct modulo m."""
    moduli = np.full(len(indices), PRIME, dtype=np.int64)
    pending = np.arange(len(indices))
    while len(pending):
        residues = np.sort(indices[pending] % moduli[pending, None], axis=1)
        pending = pending[(residues[:, 1:] == residues[:, :-1]).any(1)]
        moduli[pending] -= 1
        if len(pending) and moduli[pending].min() < TOP_VALUES:
            raise ValueError("no modulus keeps the indices of a chunk distinct")
    return moduli


@functools.cache
def _inverses() -> Floats:
    """Table of a⁻¹ in GF(65497) at index a; 0 at index 0. Uses a⁻¹ = −⌊p / a⌋ · (p mod a)⁻¹."""
    inverse = [0, 1]
    for a in range(2, PRIME):
        inverse.append(-(PRIME // a) * inverse[PRIME % a] % PRIME)
    return np.array(inverse, dtype=np.float64)


_BLOCK = 32
"""Chunks processed at once: their tables of powers, 24 KiB each, stay in a processor's cache."""

_LOW, _HIGH = 16, 8
"""x^k for k < 128 is x^(k mod 16) · (x^16)^⌊k / 16⌋, so two small tables hold all powers."""


def _reduce(numbers: Floats) -> Floats:
    """Reduce whole numbers below 2⁴⁰ modulo p to within ±(p/2 + 1) of 0, in place and exactly.

    float64 holds all of them exactly. A processor multiplies and rounds several doubles at once,
    but computes integer remainders one by one."""
    quotients = numbers * (1.0 / PRIME)
    np.rint(quotients, out=quotients)
    quotients *= PRIME
    numbers -= quotients
    return numbers


def _powers(x: Floats, count: int) -> tuple[Floats, Floats]:
    """x⁰ to x^(count − 1) on a new first axis, and x^count; `count` is a power of two."""
    powers = np.empty((count, *x.shape))
    powers[0] = 1.0
    step, size = x, 1
    while size < count:
        np.multiply(powers[:size], step, out=powers[size : 2 * size])
        _reduce(powers[size : 2 * size])
        step = _reduce(step * step)
        size *= 2
    return powers, step


class _Points:
    """Points [chunks, n] with their powers. Sums of 128 reduced products stay below 2³⁸: exact."""

    def __init__(self, x: Integers) -> None:
        low, sixteenth = _powers(_reduce(x.astype(np.float64)), _LOW)
        self._low = low.transpose(1, 0, 2)  # [chunks, 16, n]
        self._high = _powers(sixteenth, _HIGH)[0]  # [8, chunks, n]

    def values(self, coefficients: Floats) -> Floats:
        """Values [chunks, n] of polynomials with the reduced coefficients [chunks, 128]."""
        partial = _reduce(coefficients.reshape(-1, _HIGH, _LOW) @ self._low)  # [chunks, 8, n]
        partial *= self._high.transpose(1, 0, 2)
        return _reduce(partial.sum(1))

    def moments(self, weights: Floats) -> Floats:
        """Σ weight · point^k over each chunk's points, for k < 128: [chunks, 128]."""
        weighted = _reduce(self._high * weights).transpose(1, 0, 2)
        sums = weighted @ self._low.transpose(0, 2, 1)  # [chunks, 8, 16]
        return _reduce(sums.reshape(len(weights), TOP_VALUES))


def _product(a: Floats, b: Floats) -> Floats:
    """Products [2n, ...] of polynomials [n, ...] with reduced coefficients, constants first.

    The coefficients are below 2³⁷ and the Fourier transforms' error below 0.01 (a few units in the
    53rd bit of the factors' norms), so rounding gives them exactly."""
    size = len(a)
    if size > _DIRECT:
        transformed = np.fft.rfft(a, 2 * size, axis=0)
        transformed *= np.fft.rfft(b, 2 * size, axis=0)
        return _reduce(np.rint(np.fft.irfft(transformed, 2 * size, axis=0)))
    product = np.zeros((2 * size, *a.shape[1:]))
    for term in range(size):
        product[term : term + size] += a[term] * b
    return _reduce(product)


_DIRECT = 8
"""Coefficients up to which multiplying them one by one is faster than transforming."""


def _with_roots(x: Integers) -> Floats:
    """Coefficients [n + 1, chunks] of the monic polynomials with the roots x [chunks, n]."""
    # Monic factors of one degree, without their leading 1: [degree, chunks, factors].
    factors = _reduce(-x.astype(np.float64))[None]
    while factors.shape[2] > 1:
        a = np.ascontiguousarray(factors[:, :, 0::2])
        b = np.ascontiguousarray(factors[:, :, 1::2])
        factors = _product(a, b)
        factors[len(a) :] += a
        factors[len(a) :] += b
        _reduce(factors)
    return np.concatenate((factors[:, :, 0], np.ones((1, len(x)))))


def _interpolate(x: Integers, y: Integers) -> Integers:
    """Coefficients [chunks, 128], constant first, of the polynomials through (x, y) over GF(65497).

    Lagrange's formula, Σ_i y_i / P'(x_i) · P(t) / (t − x_i), where P has the roots x. In
    P(t) / (t − x_i), the coefficient of t^k is Σ_j P_(j + k + 1) · x_i^j, so all points together
    need only the moments Σ_i y_i / P'(x_i) · x_i^j."""
    result = np.empty_like(x)
    for first in range(0, len(x), _BLOCK):
        block = slice(first, first + _BLOCK)
        points, roots = _Points(x[block]), _with_roots(x[block])[1:]
        slopes = points.values(_reduce(roots.T * np.arange(1.0, TOP_VALUES + 1)))
        # A negative number −a indexes the table from its end: entry p − a, its inverse.
        weights = _reduce(y[block] * _inverses()[slopes.astype(np.int64)])
        # Σ_j P_(j + k + 1) · moment_j is a product with one factor's order reversed.
        product = _product(roots[::-1], points.moments(weights).T)
        result[block] = product[TOP_VALUES - 1 :: -1].T.astype(np.int64) % PRIME
    return result


def _evaluate(coefficients: Integers, x: Integers) -> Integers:
    """Values [chunks, n] of each chunk's polynomial at x."""
    result = np.empty_like(x)
    for first in range(0, len(x), _BLOCK):
        block = slice(first, first + _BLOCK)
        terms = _reduce(coefficients[block].astype(np.float64))
        result[block] = _Points(x[block]).values(terms).astype(np.int64) % PRIME
    return result
