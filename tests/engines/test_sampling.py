"""Seeded sampling against a literal reference and the generator's published test vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.engines.noise import gumbel_noise, philox
from peers.engines.winners import judge_margins

WORD = st.integers(0, 2**32 - 1)


def philox_reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as in the paper, on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def noise_reference(key: list[int], row: int, position: int, token: int) -> np.float32:
    h = philox_reference([token // 4, position, row, 0], key)[token % 4]
    v = (np.float32(h) + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):
        return np.float32(-np.log(-np.log1p(-v)))


def ours(counter: list[int], key: list[int]) -> list[int]:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    return [int(word) for word in philox((key[0], key[1]), (a, b, c, d))]


# kat_vectors of the Random123 distribution.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert philox_reference(counter, key) == words
    assert ours(counter, key) == words


@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
def test_philox_equals_the_reference(counter: list[int], key: list[int]) -> None:
    assert ours(counter, key) == philox_reference(counter, key)


@settings(max_examples=30)
@given(
    st.tuples(WORD, WORD),
    st.lists(WORD, min_size=1, max_size=3),
    st.lists(st.integers(0, 2**20), min_size=1, max_size=3),
    st.integers(1, 11),
)
def test_noise_equals_the_reference_at_every_entry(
    key: tuple[int, int], rows: list[int], positions: list[int], vocabulary: int
) -> None:
    noise = gumbel_noise(key, torch.tensor(rows)[:, None], torch.tensor(positions), vocabulary)
    assert noise.shape == (len(rows), len(positions), vocabulary)
    assert noise.dtype == torch.float32
    for i, row in enumerate(rows):
        for j, position in enumerate(positions):
            for token in range(vocabulary):
                expected = noise_reference(list(key), row, position, token)
                # Libraries' logarithms differ in the last digits, never more.
                assert float(noise[i, j, token]) == pytest.approx(
                    float(expected), rel=1e-5, abs=1e-6
                )


def test_rounding_falls_on_minus_infinity_never_on_plus() -> None:
    for h, low, high in ((0, 22.0, 23.0), (2**32 - 1, -math.inf, -3.0)):
        v = (torch.tensor([h]).float() + 0.5) * 2.0**-32
        noise = float(v.neg().log1p().neg().log().neg())
        assert low <= noise <= high and noise != math.inf


def test_samples_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    count = 40_000
    noise = gumbel_noise((5, 6), torch.arange(count), torch.zeros(count, dtype=torch.long), 5)
    shares = torch.bincount((logits / 0.7 + noise).argmax(-1), minlength=5) / count
    expected = torch.softmax(logits / 0.7, -1)
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((shares - expected).abs() < 5 * deviation).all()


def test_margins_are_zero_for_the_sampled_token_and_exact_for_another() -> None:
    logits = torch.arange(12, dtype=torch.float32).reshape(2, 6).sin() * 3
    noise = gumbel_noise((1, 2), torch.tensor([0, 1]), torch.tensor([0, 0]), 6)
    chosen = (logits / 0.5 + noise).argmax(-1)
    judged = judge_margins(logits, chosen, 0.5, noise)
    assert judged.margin.tolist() == [0.0, 0.0]
    probabilities = torch.softmax(logits / 0.5, -1)
    assert torch.allclose(judged.log_probability.exp(), probabilities[torch.arange(2), chosen])
    other = (chosen + 1) % 6
    perturbed = logits / 0.5 + noise
    ordered = perturbed.sort(-1, descending=True).values
    assert torch.equal(judged.gap, ordered[:, 0] - ordered[:, 1])
    expected = perturbed[[0, 1], chosen] - perturbed[[0, 1], other]
    assert torch.equal(judge_margins(logits, other, 0.5, noise).margin, expected)
    assert (expected > 0).all()
