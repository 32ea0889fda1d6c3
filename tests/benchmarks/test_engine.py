from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import engine, verification
from peers.engines.demo import VOCABULARY
from tests.demo.chat_model import make_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one with chats, and attention heads of 32 values, which vLLM takes on a CPU."""
    folder = make_chat_model(tmp_path_factory.mktemp("model"))
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def run(program: Any, capsys: Any, monkeypatch: Any, model: Path, *more: str) -> dict[str, Any]:
    options = ["--rounds", "2", "--waves", "1", "--limit", "6"]
    monkeypatch.setattr(sys, "argv", ["benchmark", "--model", str(model), *options, *more])
    program.main()
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


@pytest.mark.slow
def test_engines_see_the_same_requests_and_every_figure_has_its_spread(
    model: Path, capsys: Any, monkeypatch: Any
) -> None:
    report = run(engine, capsys, monkeypatch, model, "--batches", "2")
    figures = report["float32"]["2"]
    assert figures["requests"] == 8 and 8 <= figures["tokens"] <= 48
    for name in ("native_tokens_per_second", "hf_tokens_per_second", "native_over_hf"):
        assert 0 < figures[f"{name}_least"] <= figures[name] <= figures[f"{name}_most"]


@pytest.mark.slow
def test_every_honest_completion_passes_the_check(
    model: Path, capsys: Any, monkeypatch: Any
) -> None:
    report = run(verification, capsys, monkeypatch, model, "--batch", "8")
    assert report["rows"] == 8 and report["cheaper_at_1"] > 0
