"""Updates: the flat files that other libraries average."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from peers.outer.learning import contribution, flat
from peers.outer.learning.compression import BadContribution
from peers.outer.learning.contribution import Contribution, Header
from peers.outer.learning.state import Given, OuterOptimiser, StateFile, begin, merge

SHAPES = {"a.weight": (3, 700), "b.norm": (5,), "c.scalar": ()}


def write(path: Path, seed: int, compression: str = "fp32") -> Path:
    generator = torch.Generator().manual_seed(seed)
    values = {
        name: torch.randn(shape, generator=generator).reshape(-1) for name, shape in SHAPES.items()
    }

    def piece_of(name: str, piece: slice) -> Tensor:
        return values[name][piece]

    contribution.write(path, Header(compression, list(SHAPES.items())), piece_of, lambda *_: None)
    return path


def update_of(path: Path) -> Path:
    update = path.with_suffix(".update")
    with Contribution(path, SHAPES) as file:
        flat.write_update(file, SHAPES, update)
    return update


def test_merging_the_average_is_merging_the_contributions(tmp_path: Path) -> None:
    """What a library's average leads to, and what a record of shardcast's leads to."""
    begin(SHAPES, lambda name: torch.ones(SHAPES[name]), tmp_path / "state")
    before, how = StateFile(tmp_path / "state"), OuterOptimiser()
    given = [
        Given(name, tokens, write(tmp_path / name, seed, code))
        for seed, (name, tokens, code) in enumerate(
            [("x", 200, "fp32"), ("y", 200, "int8"), ("z", 100, "fp32")]
        )
    ]
    merge(before, given, how, tmp_path / "by-list")
    updates = [np.fromfile(update_of(each.path), "<f4") for each in given]
    (0.4 * updates[0] + 0.4 * updates[1] + 0.2 * updates[2]).astype("<f4").tofile(
        tmp_path / "average"
    )
    flat.write_contribution(tmp_path / "average", SHAPES, tmp_path / "averaged")
    merge(before, [Given("average", 500, tmp_path / "averaged")], how, tmp_path / "by-average")
    after = StateFile(tmp_path / "by-list"), StateFile(tmp_path / "by-average")
    for name in SHAPES:
        torch.testing.assert_close(after[0].weight(name), after[1].weight(name))
        torch.testing.assert_close(after[0].momentum(name), after[1].momentum(name))


def test_an_update_keeps_every_bit(tmp_path: Path) -> None:
    update = update_of(write(tmp_path / "x", 1))
    assert update.stat().st_size == 4 * flat.elements_of(SHAPES)
    flat.write_contribution(update, SHAPES, tmp_path / "y")
    assert update_of(tmp_path / "y").read_bytes() == update.read_bytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, 101.0])
def test_an_average_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    values = np.zeros(flat.elements_of(SHAPES), "<f4")
    values[-1] = value
    values.tofile(tmp_path / "update")
    with pytest.raises(BadContribution, match=r"c\.scalar is not finite, or above 100"):
        flat.write_contribution(tmp_path / "update", SHAPES, tmp_path / "y")


def test_an_average_of_another_model_is_refused(tmp_path: Path) -> None:
    np.zeros(7, "<f4").tofile(tmp_path / "update")
    with pytest.raises(BadContribution, match="has 28 bytes; the policy's has 8424"):
        flat.write_contribution(tmp_path / "update", SHAPES, tmp_path / "y")
