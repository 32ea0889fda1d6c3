"""Calibration: thresholds accept honest engines, also deep ones in bf16, and show cheats."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from peers.calibration.calibrate import EngineClass, attacks, calibrate
from peers.calibration.measure import sample
from peers.calibration.plot import area, roc
from peers.calibration.thresholds import assess, propose
from peers.calibration.workers import Generates
from peers.calibration.workload import Workload
from peers.engines import demo
from swarm.manifest import Sampling
from tests.app.harness import swarm

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower

SAMPLING = Sampling(
    temperature=1.0, max_new_tokens=24, stop_ids=[2], group_size=4, groups_per_submission=2
)
FP32, BF16 = EngineClass("float32", "cpu"), EngineClass("bfloat16", "cpu")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    demo.make_policy(folder, seed=1)
    return folder


@pytest.mark.slow
def test_fp32_thresholds_accept_honest_work_and_refuse_each_cheat(policy: Path) -> None:
    found = calibrate(policy, Workload(policy, SAMPLING, None), [FP32], submissions=3)
    thresholds = propose(list(found.honest.values()))
    for samples in found.honest.values():
        assert assess(samples, thresholds).refused == 0
    for name, samples in found.attacks.items():
        judged = assess(samples, thresholds)
        if not name.startswith("takes near ties"):  # that takes more submissions to see
            assert judged.refused > 0 or judged.tokens_until_eviction is not None, name
    pre_generated = assess(found.attacks["pre-generated"], thresholds)
    assert pre_generated.tokens_until_eviction is not None


@pytest.mark.slow
@pytest.mark.parametrize("layers", [24, 48])
def test_deep_random_models_in_bf16_are_accepted(layers: int, tmp_path: Path) -> None:
    """Their thresholds come from other submissions than the ones they are tried on."""
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(layers)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    workload, engine = Workload(tmp_path, SAMPLING, None), BF16.engine(tmp_path)
    worker = Generates(engine)
    measured = [sample(worker, engine, workload, number) for number in range(6)]
    tried = [sample(worker, engine, workload, number, "other") for number in range(8)]
    assert min(chunk.exponent_matches for each in tried for chunk in each.found.chunks) < 125
    judged = assess(tried, propose([measured]))
    assert judged.refused == 0, judged.refused_by
    assert judged.tokens_until_eviction is None
    assert judged.log_capital < 3


def test_every_named_attack_can_run(policy: Path, tmp_path: Path) -> None:
    names = [name for name, _ in attacks(policy, tmp_path, FP32, previous=[policy])]
    assert {f"older policy {policy.name}", "top-p 0.95", "best of 4", "int8 weights"} <= set(names)


def test_the_command_prints_a_table_and_writes_thresholds(policy: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "thresholds.toml", tmp_path / "roc.png"
    arguments = ["--model", policy, "--environment", "sort-digits@1", "--tokens", "8"]
    small = ["--submissions", "2", "--groups", "1", "--group-size", "4", "--engines", "float32"]
    shown = swarm("proofs", "calibrate", *map(str, arguments), *small, "--out", out, "--plot", plot)
    assert shown.status == 0, shown.errors
    assert "pre-generated" in shown.output and "[thresholds]" in shown.output
    assert "honest_proof_error" in tomllib.loads(out.read_text())["thresholds"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    told = swarm("proofs", "calibrate", *map(str, arguments), *small, "--json")
    assert json.loads(told.output)["attacks"]["pre-generated"]["refused"] > 0


def test_an_unknown_engine_class_is_one_sentence(policy: Path) -> None:
    refused = swarm("proofs", "calibrate", "--model", str(policy), "--engines", "float99")
    assert refused.status == 2
    assert "float99" in refused.errors


def test_the_area_under_the_curve() -> None:
    assert area([0.0, 1.0], [2.0]) == 1.0
    assert area([0.0, 1.0], [0.5]) == 0.5
    false, true = roc([0.0, 1.0], [0.5, 2.0])
    assert (false[0], true[0], false[-1], true[-1]) == (0.0, 0.0, 1.0, 1.0)
    assert false == sorted(false) and true == sorted(true)
