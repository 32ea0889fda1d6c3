"""Sketches of hidden states: their sizes, their errors, and what is made of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.deep_model import make_deep_model
from benchmarks.sketches import SCHEMES, TOPLOC, Scheme, _area, _drawn, measured
from benchmarks.turns import Episodes, make_tool_policy
from peers.calibration import plot
from peers.calibration.calibrate import EngineClass
from swarm.manifest import Sampling


@pytest.mark.parametrize(
    ("scheme", "tokens", "size"),
    [
        (Scheme("chunk", 254, 8), 7, 256),
        (Scheme("chunk", 254, 8), 33, 512),
        (Scheme("chunk", 128, 16), 32, 256),
        (Scheme("token", 8, 8), 32, 258),
        (Scheme("token", 4, 16), 7, 56),
    ],
)
def test_the_bytes_of_a_completions_sketches(scheme: Scheme, tokens: int, size: int) -> None:
    assert scheme.size_bytes(tokens) == size


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_error_is_that_of_the_hidden_states(scheme: Scheme) -> None:
    """Products with random directions keep relative distances on average."""
    generator = torch.Generator().manual_seed(1)
    own = torch.randn(32, 64, generator=generator)
    change = 0.1 * torch.randn(32, 64, generator=generator)
    drawn = _drawn(64, seed=2)
    same, other = (
        scheme.errors(claimed.bfloat16(), own.bfloat16(), drawn) for claimed in (own, own + change)
    )
    assert len(same) == (32 if scheme.per == "token" else 1)
    assert sum(same) / len(same) < 0.05
    assert sum(same) / len(same) < sum(other) / len(other)
    if scheme.values > 30:
        assert math.isclose(other[0], 0.1, rel_tol=0.4)


def test_the_area_is_that_of_the_calibration() -> None:
    honest, cheat = [0.0, 1.0, 1.0, 3.0], [1.0, 2.0, 4.0]
    assert math.isclose(_area(honest, cheat), plot.area(honest, cheat))


def test_a_comparison_names_every_scheme_and_cheat(tmp_path: Path) -> None:
    folder = make_deep_model(tmp_path, layers=2, vocabulary=128)
    sampling = Sampling(max_new_tokens=8, stop_ids=[2], group_size=2, groups_per_submission=1)
    found = measured(folder, sampling, [], seeds=2, submissions=1)
    assert set(found) == {TOPLOC, *(scheme.name for scheme in SCHEMES)}
    assert {"int4 weights", "temperature 0.9"} <= set(found[TOPLOC]["cheats"])


@pytest.mark.slow
def test_honest_episodes_of_two_turns_fit_their_recomputation(tmp_path: Path) -> None:
    episodes = Episodes(make_tool_policy(tmp_path, seed=3))
    engine = EngineClass("float32", "cpu").engine(tmp_path)
    found = episodes.sample(engine, engine, 0, "test")
    assert found.completions > 1.2 * 512, "some episodes have two turns"
    assert found.found.margins.max() == 0.0
    assert {chunk.exponent_matches for chunk in found.found.chunks} == {128}
