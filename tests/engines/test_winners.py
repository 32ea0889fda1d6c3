"""Noise for the tokens that can win gives what noise for all tokens gives, bit for bit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.engines import winners
from peers.engines.noise import Drawn
from peers.engines.sampling import Ahead, choose, noise_of
from peers.engines.winners import (
    VOCABULARY_MIN,
    find_search,
    judge_margins,
    largest,
    margins,
    search_by_numpy,
)

WORD = st.integers(0, 2**32 - 1)
SHAPES = ["normal", "flat", "peaked", "few", "masked", "huge", "tiny"]


def logits_of(shape: str, rows: int, size: int, seed: int) -> torch.Tensor:
    """Logits as models give them, and as they never should."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, size, generator=generator)
    match shape:
        case "flat":
            return torch.full((rows, size), 1.5)
        case "peaked":
            normal[:, seed % size] += 30
        case "few":  # many equal logits
            return (normal * 2).round()
        case "masked":
            return normal.masked_fill(normal < 1, -torch.inf)
        case "huge":
            return normal * 1e6
        case "tiny":
            return normal * 1e-6
    return normal * 3


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.tuples(WORD, WORD),
    st.integers(1, 3),
    st.integers(5, 3 * VOCABULARY_MIN),
    st.integers(0, 2**31),
)
def test_the_winners_are_those_of_all_the_noise(
    shape: str, key: tuple[int, int], rows: int, size: int, seed: int
) -> None:
    scaled = logits_of(shape, rows, size, seed)
    drawn = Drawn(key, torch.arange(rows) + seed % 1000, torch.arange(rows) * 7)
    everything = scaled + drawn.noise(size)
    best, which = everything.max(-1)
    for count in (1, 2):
        values, tokens = largest(scaled, drawn, count)
        assert torch.equal(values[:, 0], best) and torch.equal(tokens[:, 0], which)
    second = everything.scatter(-1, which[:, None], -torch.inf).amax(-1)
    assert torch.equal(values[:, 1], second)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["normal", "flat", "peaked", "few"]), st.integers(0, 2**31))
def test_margins_are_those_of_all_the_noise(shape: str, seed: int) -> None:
    logits = logits_of(shape, 3, VOCABULARY_MIN, seed)
    drawn = Drawn((seed, 1), torch.arange(3), torch.arange(3) * 7)
    tokens = torch.tensor([0, seed % VOCABULARY_MIN, 1])
    tokens[2] = largest(logits / 0.7, drawn)[1][2, 0]
    found = margins(logits, tokens, 0.7, drawn)
    known = judge_margins(logits, tokens, 0.7, drawn.noise(VOCABULARY_MIN))
    assert torch.equal(found.margin, known.margin) and torch.equal(found.gap, known.gap)
    assert torch.allclose(found.log_probability, known.log_probability, atol=1e-5)
    assert found.margin[2] == 0


@dataclass(eq=False)
class Row:
    noise_key: tuple[int, int] | None
    noise_row: int
    position: int
    noise: Ahead | None = None


@pytest.mark.parametrize("keys", [[(1, 2)] * 3, [(1, 2), None, (3, 4), (1, 2), None], [None] * 2])
@pytest.mark.parametrize("size", [64, 1500, VOCABULARY_MIN])
def test_rows_choose_as_with_all_the_noise(keys: list[tuple[int, int] | None], size: int) -> None:
    """A tiny vocabulary, whose noise is computed ahead, a middle one, and a large one."""
    logits = logits_of("normal", len(keys), size, 3)
    rows = [Row(key, index, 9 * index) for index, key in enumerate(keys)]
    for step in range(40):
        everything = logits.clone()
        for index, row in enumerate(rows):
            row.position = 9 * index + step
            if row.noise_key is not None:
                at = torch.tensor([row.noise_row]), torch.tensor([row.position])
                everything[index] += Drawn(row.noise_key, *at).noise(size)[0]
        assert torch.equal(logits + noise_of(rows, logits), everything)
        assert choose(rows, logits).tolist() == everything.max(-1).indices.tolist()


def test_equal_sums_are_won_by_the_first_token() -> None:
    """Logits so large that noise is rounded away leave nothing but ties."""
    scaled = torch.full((2, 5000), 2.0**40)
    drawn = Drawn((1, 2), torch.arange(2), torch.arange(2))
    assert torch.equal(
        largest(scaled, drawn)[1][:, 0], (scaled + drawn.noise(5000)).max(-1).indices
    )


@settings(max_examples=20, deadline=None)
@given(st.tuples(WORD, WORD), WORD, WORD, st.integers(1, 3000), WORD)
def test_the_compiled_search_finds_what_numpy_finds(
    key: tuple[int, int], row: int, position: int, size: int, limit: int
) -> None:
    compiled = find_search()
    if compiled is None:
        pytest.skip("there is no C compiler")
    found = compiled(key, row, position, size, limit)
    expected = search_by_numpy(key, row, position, size, limit)
    assert np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])


@pytest.mark.parametrize("error", [FileNotFoundError("cc"), subprocess.TimeoutExpired("cc", 60)])
def test_without_a_compiler_there_is_no_search(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def compile_nothing() -> winners.Search:
        raise error

    monkeypatch.setattr(winners, "_compile", compile_nothing)
    assert find_search.__wrapped__() is None


def test_a_library_with_other_words_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "SOURCE", winners.SOURCE.replace("0xBB67AE85u", "0xBB67AE87u"))
    assert find_search.__wrapped__() is None
