"""What `benchmarks.evidence` does to models and to samples; its figures need a real model."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.evidence import Bench, with_window, without_layer
from peers.calibration.calibrate import EngineClass
from peers.engines.config import read_config


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
