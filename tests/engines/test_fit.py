from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from peers.engines import demo
from peers.engines.cache import Shape
from peers.engines.config import read_supported_config
from peers.engines.families import describe
from peers.engines.fit import Need, check_fits, need_of, position_bytes
from peers.engines.model import read_weights
from swarm.errors import UserError
from swarm.jobs import Hardware

GB = 10**9


def test_the_figures_are_those_of_the_engine(tmp_path: Path) -> None:
    demo.make_policy(tmp_path, seed=1)
    config = read_supported_config(tmp_path)
    model = describe(config)
    shape = Shape(
        layers=len(model.layers),
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        hidden_size=model.hidden_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert position_bytes(config, "float32") == shape.position_bytes
    need = need_of(tmp_path, "float32", 10_000)
    weights = sum(weight.numel() * 4 for weight in read_weights(tmp_path).values())
    assert weights <= need.weights_bytes <= 1.1 * weights
    assert need.length == config["max_position_embeddings"]
    assert need.row_bytes == need.length * shape.position_bytes
    assert need_of(tmp_path, "float32", 10_000, devices=2).weights_bytes == need.weights_bytes // 2


@pytest.mark.parametrize(
    ("need", "free", "device", "sentence"),
    [
        (Need(4 * GB, 2 * GB, GB, 100), 3 * GB, "cpu", '2 GB too few; set dtype = "bfloat16"'),
        (
            Need(4 * GB, 4 * GB, GB, 100),
            45 * GB // 10,
            "cpu",
            "0.5 GB too few; stop other programs",
        ),
        (
            Need(60 * GB, 60 * GB, GB, 100),
            24 * GB,
            "cuda:0",
            "37 GB too few; split it over at least",
        ),
        (Need(60 * GB, 60 * GB, GB, 100), 24 * GB, "cpu", "stages under [inference]"),
    ],
)
def test_a_policy_that_does_not_fit_says_by_how_much(
    need: Need, free: int, device: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_fits(need, free, "float32", Hardware(), device)


def test_a_policy_that_fits_is_silent() -> None:
    check_fits(Need(GB, GB, GB, 100), 2 * GB, "bfloat16", Hardware(), "cpu")
