"""The figures for GPUs, tried on a CPU."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from benchmarks import accelerator
from benchmarks.trainer import PROMPT_TOKENS
from peers.engines.model import count_parameters


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerator", *arguments])
    accelerator.main()


def test_every_attention_gives_figures_or_a_reason(capsys: Any, monkeypatch: Any) -> None:
    attentions = ["flash_attention_2", "flex_attention", "sdpa", "eager"]
    run(
        monkeypatch,
        *("--device", "cpu", "--models", "tiny", "--tokens", "512", "--steps", "1"),
        *("--dtype", "fp32", "--attention", ",".join(attentions), "--peak-tflops", "0.5"),
    )
    result = json.loads(capsys.readouterr().out)
    assert result["dtype"] == "fp32" and result["torch"] == torch.__version__
    tiny = result["models"]["tiny"]
    prompts = tiny["completions"] * PROMPT_TOKENS
    inputs = prompts + tiny["completion_tokens"]["sum"] - tiny["completions"]
    assert inputs == result["tokens"] == 512
    found = tiny["attention"]
    assert list(found) == attentions
    for attention in attentions[:2]:
        assert found[attention] == {"reason": f"{attention} has no backward pass on a cpu"}
    sdpa, eager = found["sdpa"], found["eager"]
    assert sdpa["peak_bytes"] > 0 and sdpa["tokens_per_second"] > 0
    assert 0 < sdpa["model_flops_share"] < 1
    assert "speedup_over_sdpa" not in sdpa
    assert eager["speedup_over_sdpa"] == sdpa["train_seconds"] / eager["train_seconds"]
    for figure in ("loss", "gradient_norm"):
        assert abs(sdpa[figure]) > 1e-3
        assert sdpa[figure] == pytest.approx(eager[figure], abs=1e-6)


def test_memory_that_does_not_suffice_is_a_reason(capsys: Any, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

    monkeypatch.setattr(accelerator, "repeat_step", full)
    run(
        monkeypatch,
        *("--device", "cpu", "--models", "tiny", "--tokens", "512", "--dtype", "fp32"),
        *("--attention", "sdpa"),
    )
    assert json.loads(capsys.readouterr().out)["models"]["tiny"]["attention"]["sdpa"] == {
        "reason": "the device's memory does not suffice: CUDA out of memory. "
        "Tried to allocate 9 GiB."
    }


@pytest.mark.parametrize("name, parameters", [("0.5b", 494_032_768), ("1.5b", 1_543_714_304)])
def test_models_have_the_published_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = accelerator.new_model(name)
    assert count_parameters(model) == parameters


@pytest.mark.parametrize("tokens", [512, 2048, 1 << 14])
def test_tokens_are_filled_exactly(tokens: int) -> None:
    groups = accelerator.make_groups(tokens, 512)
    lengths = [len(each.model_tokens) for group in groups for each in group.rollouts]
    assert sum(lengths) + len(lengths) * (PROMPT_TOKENS - 1) == tokens
    assert min(lengths) >= 1
    assert max(lengths) > 3 * min(lengths)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_try(capsys: Any, monkeypatch: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    assert "--device cpu --models tiny --tokens 2048" in said.err
