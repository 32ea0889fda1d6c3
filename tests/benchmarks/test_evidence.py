"""What `benchmarks.evidence` does to models and to samples; its figures need a real model."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.evidence import (
    CALIBRATION,
    DTYPES,
    Bench,
    contenders,
    figures,
    groups_of,
    with_window,
    without_layer,
)
from peers.calibration.calibrate import EngineClass
from peers.calibration.thresholds import propose
from peers.engines.config import read_config
from tests.calibration.test_calibrate import rounded_sample


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return Bench(folder, folder / "kept")


def test_cheats_have_another_model(bench: Bench) -> None:
    text = [list(range(1, 60)) + list(range(1, 60))]
    usual = EngineClass("float32", "cpu").engine(bench.model).prefill(text, [[4, 117]]).states[0]
    for write, layers, alike in ((with_window, 4, True), (without_layer, 3, False)):
        folder = bench.changed(write.__name__, partial(write, bench))
        assert read_config(folder)["num_hidden_layers"] == layers
        found = EngineClass("float32", "cpu").engine(folder).prefill(text, [[4, 117]]).states[0]
        same = np.allclose(found[0], usual[0], atol=1e-4)
        assert same == alike, "a window changes nothing before it is full"
        assert not np.allclose(found[1], usual[1], atol=1e-4)


def test_groups_are_parts_of_their_submission() -> None:
    drawn = np.random.default_rng(1)
    whole = rounded_sample(drawn, 8, 0.02, 0.05)
    assert [part.tokens for part in groups_of(whole)] == [whole.tokens], "it is one group"
    found = figures([whole, whole], propose([[whole]]))
    assert (found["submissions"], found["groups"], found["refused"]) == (2, 2, 0)
    assert found["tokens"] == 2 * whole.tokens and found["tokens_until_eviction"] is None


def test_honest_workers_have_about_the_tokens_that_were_asked_for() -> None:
    workers = [each for each in contenders(200_000) if each.name.startswith("honest")]
    tokens = sum(each.submissions * each.groups * 8 * 128 for each in workers) * len(DTYPES)
    assert 200_000 <= tokens <= 260_000, "completions end before their limit"
    assert {each.dtype for each in workers} == set(DTYPES)
    assert CALIBRATION not in {each.name for each in workers}
