"""The figures for GPUs, tried on a CPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import accelerator, shapes, training_step
from benchmarks.trainer import PROMPT_TOKENS
from peers.engines.model import count_parameters


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerator", *arguments])
    accelerator.main()


@pytest.mark.slow
def test_every_part_gives_figures(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    run(monkeypatch, "--smoke", "--output", str(tmp_path / "figures"))
    result = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "figures").read_text()) == result
    assert result["dtype"] == "float32" and result["torch"] == torch.__version__
    tiny = result["models"]["tiny"]
    assert set(tiny["generate"]) == {"batch 2, graphs", "batch 2, no graphs"}
    for figures in (*tiny["generate"].values(), tiny["prefill"]):
        assert figures["tokens_per_second_least"] <= figures["tokens_per_second"]
    assert "swarm engine install" in tiny["vllm"]["reason"]
    assert tiny["swap"]["seconds"] > 0 and tiny["swap"]["bytes"] > 1000
    assert tiny["overhead"]["noise_share"] < 1 and 0 < tiny["overhead"]["proofs_share"] < 1
    assert tiny["verify"]["cheaper_at_default"] > tiny["verify"]["cheaper_at_1"] > 0
    training = tiny["train"]
    prompts = training["completions"] * PROMPT_TOKENS
    inputs = prompts + training["completion_tokens"]["sum"] - training["completions"]
    assert inputs == training["tokens"] == 512
    assert training["attention"]["sdpa"]["tokens_per_second"] > 0


def test_a_part_ends_after_its_seconds(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    run(
        monkeypatch,
        *("--device", "cpu", "--models", "tiny", "--parts", "swap", "--seconds", "1"),
    )
    reason = {"reason": "it did not end within 1 s"}
    tiny = json.loads(capsys.readouterr().out)["models"]["tiny"]
    assert tiny["swap"] == reason


@pytest.mark.slow
def test_every_attention_gives_figures_or_a_reason() -> None:
    attentions = ["flash_attention_2", "flex_attention", "sdpa", "eager"]
    given = argparse.Namespace(
        device="cpu", tokens=512, steps=1, dtype="float32", attention=attentions,
        activation_checkpointing=False,
    )  # fmt: skip
    found = training_step.compare("tiny", given, peak=0.5e12)["attention"]
    assert list(found) == attentions
    for attention in attentions[:2]:
        assert found[attention] == {"reason": f"{attention} has no backward pass on a cpu"}
    sdpa, eager = found["sdpa"], found["eager"]
    assert sdpa["peak_bytes"] > 0 and sdpa["tokens_per_second"] > 0
    assert sdpa["seconds_per_step_least"] <= sdpa["seconds_per_step_most"]
    assert 0 < sdpa["model_flops_share"] < 1
    assert "speedup_over_sdpa" not in sdpa
    assert eager["speedup_over_sdpa"] == sdpa["train_seconds"] / eager["train_seconds"]
    for figure in ("loss", "gradient_norm"):
        assert abs(sdpa[figure]) > 1e-3
        assert sdpa[figure] == pytest.approx(eager[figure], abs=1e-6)


def test_memory_that_does_not_suffice_is_a_reason(monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

    monkeypatch.setattr(training_step, "repeat_step", full)
    given = argparse.Namespace(
        device="cpu", tokens=512, steps=1, dtype="float32", attention=["sdpa"],
        activation_checkpointing=False,
    )  # fmt: skip
    assert training_step.compare("tiny", given, peak=0.0)["attention"]["sdpa"] == {
        "reason": "the device's memory does not suffice: CUDA out of memory. "
        "Tried to allocate 9 GiB."
    }


@pytest.mark.parametrize("name, parameters", [("0.5b", 494_032_768), ("1.5b", 1_543_714_304)])
def test_models_have_the_published_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = shapes.new_model(name)
    assert count_parameters(model) == parameters


@pytest.mark.parametrize("tokens", [512, 2048, 1 << 14])
def test_tokens_are_filled_exactly(tokens: int) -> None:
    groups = training_step.make_groups(tokens, 512)
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
    assert "python -m benchmarks.accelerator --smoke" in said.err
