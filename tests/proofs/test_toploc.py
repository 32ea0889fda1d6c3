"""TOPLOC: golden bytes, an independent reference, hostile proofs, and what is told apart."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peers.proofs import toploc
from peers.proofs.format import PRIME, ProofFormatError, check_format
from swarm.wire.manifest import Thresholds

GOLDEN = Path(__file__).parent / "toploc_golden.json"
"""Made by `golden_hidden` → `build`, and equal to toploc 0.1.6's bytes:
{tokens of the completion: [proof in hex, ...]}."""


def golden_hidden(tokens: int) -> tuple[Tensor, Tensor]:
    """(prompt rows [4, 96], completion rows [tokens, 96]) in bf16, from integers alone.

    Value i has bit pattern sign(i) << 15 | 0x3000 + (1234 i mod 3581). 3581 is prime and larger
    than the number of values, so no two magnitudes are equal and top-128 has no ties.
    """
    patterns = []
    for i in range((4 + tokens) * 96):
        pattern = 0x3000 + 1234 * i % 3581 + ((i * 7919 >> 3 & 1) << 15)
        patterns.append(pattern - 0x10000 if pattern >= 0x8000 else pattern)
    rows = torch.tensor(patterns, dtype=torch.int16).view(torch.bfloat16).reshape(-1, 96)
    return rows[:4], rows[4:]


def reference_proof(chunk: Tensor) -> bytes:
    """The proof by the book: Lagrange's basis on Python integers."""
    patterns = [value & 0xFFFF for value in chunk.reshape(-1).view(torch.int16).tolist()]
    top = sorted(range(len(patterns)), key=lambda i: patterns[i] & 0x7FFF)[-128:]
    modulus = next(m for m in range(PRIME, 0, -1) if len({i % m for i in top}) == 128)
    points = [(i % modulus, patterns[i]) for i in top]
    product = [1]  # Π (x − x_j)
    for x, _ in points:
        product = [
            ((product[i - 1] if i else 0) - x * (product[i] if i < len(product) else 0)) % PRIME
            for i in range(len(product) + 1)
        ]
    coefficients = [0] * 128
    for x, y in points:
        basis, carry = [0] * 128, 0  # Π / (x − x_k), by synthetic division
        for i in range(127, -1, -1):
            carry = basis[i] = (product[i + 1] + x * carry) % PRIME
        denominator = math.prod(x - other for other, _ in points if other != x) % PRIME
        factor = y * pow(denominator, -1, PRIME)
        coefficients = [(c + factor * b) % PRIME for c, b in zip(coefficients, basis, strict=True)]
    return b"".join(word.to_bytes(2, "big") for word in (modulus, *coefficients))


def random_rows(rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).bfloat16()


@pytest.mark.parametrize("tokens", [1, 31, 32, 33])
def test_golden_bytes(tokens: int) -> None:
    chunks = toploc.chunk_rows(*golden_hidden(tokens))
    expected = [bytes.fromhex(proof) for proof in json.loads(GOLDEN.read_text())[str(tokens)]]
    assert toploc.build(chunks) == expected
    assert [reference_proof(chunk) for chunk in chunks] == expected
    check_format(expected, [tokens])
    for result in toploc.verify(chunks, expected):
        assert result == toploc.ChunkResult(128, 0.0, 0.0, 0, 0.0, True)


def test_the_toploc_package_makes_the_same_bytes() -> None:
    package = pytest.importorskip("toploc")
    for tokens in (1, 31, 32, 33):
        chunks = toploc.chunk_rows(*golden_hidden(tokens))
        theirs = [
            package.build_proofs_bytes([chunk], len(chunk), 128, skip_prefill=True)[0]
            for chunk in chunks
        ]
        assert toploc.build(chunks) == theirs
    # Real widths, where many values tie at the edge of the top 128.
    for width in (96, 512, 2048):
        rows = random_rows(70, width)
        proofs = toploc.build(toploc.chunk_rows(rows[:0], rows))
        assert proofs == package.build_proofs_bytes(list(rows), 32, 128, skip_prefill=True)
        other = (rows.float() * 1.01).bfloat16()
        ours = toploc.verify(toploc.chunk_rows(other[:0], other), proofs)
        theirs = package.verify_proofs_bytes(other[:64], proofs[:2], 32, 128, skip_prefill=True)
        for mine, package_result in zip(ours, theirs, strict=False):
            assert 128 - mine.exponent_matches == package_result.exp_mismatches
            assert mine.mantissa_mean == pytest.approx(package_result.mant_err_mean, abs=1e-5)
            assert mine.mantissa_median == package_result.mant_err_median


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**20), st.integers(4, 300), st.integers(1, 40))
def test_build_interpolates_the_points_and_verifies(seed: int, width: int, rows: int) -> None:
    hidden = random_rows(rows + 32, width, seed)
    chunks = toploc.chunk_rows(hidden[:32], hidden[32:])
    proofs = toploc.build(chunks)
    check_format(proofs, [rows])
    assert all(result.exponent_matches == 128 for result in toploc.verify(chunks, proofs))
    # All at once equals one by one.
    assert proofs == [toploc.build([chunk])[0] for chunk in chunks]


@pytest.mark.parametrize("size", [8192, 8193, 20_000])
def test_sifting_a_large_chunk_changes_nothing_ties_included(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for values in (
        torch.randn(size, generator=generator),
        torch.randint(-40, 40, (size,), generator=generator).float(),
        torch.arange(size).float(),
        -torch.arange(size).float().flip(0),
        torch.zeros(size),
    ):
        chunk = values.bfloat16()
        indices, _ = toploc._top_values([chunk[None]])
        assert set(indices[0].tolist()) == set(chunk.abs().topk(128).indices.tolist())


def test_the_largest_injective_modulus_is_found() -> None:
    # Two indices 65497 apart collide at the first modulus, two 65496 apart at the next.
    hidden = torch.zeros(32, 5000)
    flat = hidden.view(-1)
    flat[20_000:20_124] = torch.arange(1, 125).float()
    for index in (0, 65497, 10, 10 + 65496):
        flat[index] = 500.0 + index % 7
    chunk = hidden.bfloat16()
    proof = toploc.build([chunk])[0]
    assert int.from_bytes(proof[:2], "big") == 65495
    assert toploc.verify([chunk], [proof])[0] == toploc.ChunkResult(128, 0.0, 0.0, 0, 0.0, True)
    assert reference_proof(chunk) == proof


def outlier_rows(width: int, seed: int, rows: int = 32) -> Tensor:
    """Hidden states whose largest entries lie in 16 dimensions, of one sign and nearly one size."""
    hidden = random_rows(rows, width, seed).float()
    for number in range(16):
        middle = 24.0 * (-1) ** number
        hidden[:, 5 * number] = middle * (1 + 0.02 * hidden[:, 5 * number])
    return hidden.bfloat16()


def with_modulus(modulus: int, points: dict[int, int]) -> bytes:
    """A proof with this modulus, through points {residue: bit pattern} and zeros elsewhere."""
    spare = (residue for residue in range(modulus) if residue not in points)
    nodes = {**points, **dict.fromkeys(itertools.islice(spare, 128 - len(points)), 0)}
    coefficients = toploc._interpolate(
        np.array([list(nodes)]), np.array([list(nodes.values())]) % PRIME
    )
    return np.concatenate(([modulus], coefficients[0])).astype(">u2").tobytes()


@pytest.mark.parametrize("width", [96, 512, 4096])
def test_a_proof_of_dimensions_without_positions_fits_no_text(width: int) -> None:
    """Modulo a multiple of the width, one polynomial knows the largest entries of every text."""
    modulus = width * -(-128 // width)
    usual = (1.03 * outlier_rows(width, seed=1).float().mean(0)).bfloat16().view(torch.int16)
    points = {
        residue: int(usual[residue % width]) & 0xFFFF
        for residue in range(modulus)
        if residue % width in range(0, 80, 5)
    }
    proof = with_modulus(modulus, points)
    check_format([proof], [32])
    for seed in range(2, 5):
        result = toploc.verify([outlier_rows(width, seed)], [proof])[0]
        assert not result.accepted and result.exponent_matches == 0


@pytest.mark.parametrize("width", [4096, 8192])
@pytest.mark.parametrize("make", [random_rows, outlier_rows])
def test_the_modulus_is_bound_by_the_verifiers_own_values(width: int, make: Any) -> None:
    for seed in range(12):
        hidden = make(32, width, seed) if make is random_rows else make(width, seed)
        proof = toploc.build([hidden])[0]
        noise = random_rows(32, width, seed=100 + seed).float()
        near = (hidden.float() * (1 + 0.02 * noise)).bfloat16()
        modulus = np.frombuffer(proof, ">u2")[:1].astype(np.int64)
        least = int(toploc._least_moduli([near], np.array([0]))[0])
        assert PRIME - 100 < least <= modulus[0], "rounding never costs an honest worker its proof"
        assert toploc.verify([near], [proof])[0].exponent_matches > 0
        lower = with_modulus(least - 1, {})
        assert toploc.verify([near], [lower])[0].exponent_matches == 0


def test_a_small_chunk_has_one_modulus() -> None:
    hidden = random_rows(32, 64)
    indices, patterns = toploc._top_values([hidden])
    for modulus in (2048, 65496):  # both keep all 2,048 indices distinct
        points = dict(zip(indices[0] % modulus, patterns[0], strict=True))
        assert toploc.verify([hidden], [with_modulus(modulus, points)])[0].exponent_matches == 0
    points = dict(zip(indices[0], patterns[0], strict=True))
    assert with_modulus(PRIME, points) == toploc.build([hidden])[0]


def test_short_chunks_take_the_rows_before_them() -> None:
    prompt, completion = golden_hidden(34)
    chunks = toploc.chunk_rows(prompt, completion)
    assert [len(chunk) for chunk in chunks] == [32, 2]
    assert torch.equal(
        toploc.chunk_rows(prompt, completion[:1])[0], torch.cat((prompt[-1:], completion[:1]))
    )
    assert torch.equal(toploc.chunk_rows(prompt, completion[:33])[1], completion[31:33])
    narrow = torch.arange(40).reshape(-1, 1).bfloat16()
    with pytest.raises(ValueError, match="40 rows of 1 values is too short"):
        toploc.chunk_rows(narrow[:8], narrow[8:])
    with pytest.raises(ValueError, match="without tokens"):
        toploc.chunk_rows(prompt, completion[:0])


@given(st.integers(1, 100), st.integers(0, 6), st.integers(30, 140))
def test_chunks_cover_every_row_once_and_pad_only_from_before(
    tokens: int, prompt_rows: int, width: int
) -> None:
    numbers = torch.arange(prompt_rows + tokens).float()
    hidden = numbers[:, None].expand(-1, width).bfloat16()
    if (prompt_rows + tokens) * width < 128:
        with pytest.raises(ValueError, match="too short"):
            toploc.chunk_rows(hidden[:prompt_rows], hidden[prompt_rows:])
        return
    chunks = toploc.chunk_rows(hidden[:prompt_rows], hidden[prompt_rows:])
    assert len(chunks) == -(-tokens // 32)
    for number, chunk in enumerate(chunks):
        end = prompt_rows + min(32 * number + 32, tokens)
        start = prompt_rows + 32 * number
        assert torch.equal(chunk, hidden[end - len(chunk) : end])
        assert chunk.numel() >= 128
        assert len(chunk) == end - start or (len(chunk) - 1) * width < 128


def good_proof() -> bytes:
    return toploc.build([random_rows(32, 64)])[0]


HOSTILE: list[tuple[list[bytes], int, str]] = [
    ([], 1, "need 1 proofs, not 0"),
    ([b""], 1, "0 bytes"),
    ([b"\xff\xd9"], 1, "2 bytes"),
    ([bytes(258)], 1, "modulus 0"),
    ([b"\x00\x7f" + bytes(256)], 1, "modulus 127"),
    ([b"\xff\xda" + bytes(256)], 1, "modulus 65498"),
    ([b"\xff\xd9" + bytes(254) + b"\xff\xd9"], 1, "coefficient 65497"),
    ([b"\xff\xd9" + bytes(257)], 1, "259 bytes"),
    ([b"\xff\xd9" + bytes(256)] * 2, 32, "need 1 proofs, not 2"),
    ([b"\xff\xd9" + bytes(256)], 33, "need 2 proofs, not 1"),
]


@pytest.mark.parametrize(("proofs", "tokens", "message"), HOSTILE)
def test_hostile_proofs_are_refused_before_arithmetic(
    proofs: list[bytes], tokens: int, message: str
) -> None:
    with pytest.raises(ProofFormatError, match=message):
        check_format(proofs, [tokens])
    with pytest.raises(ProofFormatError):
        toploc.verify([random_rows(32, 64)] * -(-tokens // 32), proofs)


def test_constant_polynomials_are_refused() -> None:
    for constant in (0, 0x3F80, 0x4040, 0x4080):
        proof = b"\xff\xd9" + constant.to_bytes(2, "big") + bytes(254)
        assert not toploc.verify([random_rows(32, 64)], [proof])[0].accepted


def test_rounding_passes_and_other_weights_fail() -> None:
    hidden = random_rows(320, 256)
    proofs = toploc.build(toploc.chunk_rows(hidden[:0], hidden))
    noise = random_rows(320, 256, seed=9).float()
    near = (hidden.float() * (1 + 0.004 * noise)).bfloat16()
    for result in toploc.verify(toploc.chunk_rows(near[:0], near), proofs):
        assert result.accepted and result.exponent_matches > 110 and result.sign_mismatches == 0
    other = random_rows(320, 256, seed=10)
    for result in toploc.verify(toploc.chunk_rows(other[:0], other), proofs):
        assert not result.accepted and result.exponent_matches < 20


@pytest.mark.parametrize(("flipped", "accepted"), [(3, True), (4, False), (128, False)])
def test_signs_are_compared(flipped: int, accepted: bool) -> None:
    hidden = random_rows(32, 64)
    proofs = toploc.build([hidden])
    indices, _ = toploc._top_values([hidden])
    altered = hidden.clone().reshape(-1)
    altered[torch.from_numpy(indices[0][:flipped].copy())] *= -1
    result = toploc.verify([altered.reshape(32, 64)], proofs)[0]
    assert result.sign_mismatches == flipped and result.exponent_matches == 128
    assert result.accepted == accepted


@pytest.mark.parametrize(
    ("thresholds", "accepted"),
    [({}, False), ({"proof_mantissa_mean_max": 127.0, "proof_mantissa_median_max": 127.0}, True)],
)
def test_thresholds_can_be_the_runs_own(thresholds: dict[str, Any], accepted: bool) -> None:
    hidden = random_rows(2, 64)  # 128 values, so all of them are compared
    shifted = (hidden.view(torch.int16) ^ 0x40).view(torch.bfloat16)  # 64 in every mantissa
    result = toploc.verify([shifted], toploc.build([hidden]), Thresholds(**thresholds))[0]
    assert result == toploc.ChunkResult(128, 64.0, 64.0, 0, 0.5, accepted)


def test_wrong_dtypes_and_small_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="must be bfloat16"):
        toploc.build([torch.zeros(32, 64)])
    with pytest.raises(ValueError, match="127 values"):
        toploc.build([torch.zeros(1, 127).bfloat16()])
    assert toploc.build([]) == [] and toploc.verify([], []) == []


@pytest.mark.parametrize("chunks", [1, 32, 33])
def test_interpolation_and_evaluation_are_exact_at_the_extremes(chunks: int) -> None:
    """Against Horner's rule on integers, with the largest nodes, values and coefficients."""
    generator = np.random.default_rng(chunks)
    x = np.stack([generator.permutation(PRIME)[:128] for _ in range(chunks)])
    x[0] = np.arange(PRIME - 128, PRIME)
    y = generator.integers(0, PRIME, x.shape)
    y[-1] = PRIME - 1
    coefficients = toploc._interpolate(x, y)
    assert coefficients.min() >= 0 and coefficients.max() < PRIME
    elsewhere = generator.integers(0, PRIME, x.shape)
    for points, values in ((x, y), (elsewhere, toploc._evaluate(coefficients, elsewhere))):
        value = np.zeros_like(points)
        for term in range(127, -1, -1):
            value = (value * points + coefficients[:, term, None]) % PRIME
        assert (value == values).all()
