"""Calibration: thresholds accept honest engines, also deep ones in bf16, and show cheats."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from peers.calibration.calibrate import EngineClass, Kept, Measurement, attacks
from peers.calibration.measure import Sample, sample
from peers.calibration.thresholds import area, assess, propose, roc
from peers.calibration.workers import Generates, HandedIn
from peers.calibration.workload import Workload
from peers.engines import demo
from peers.proofs.toploc import ChunkResult
from peers.validator.evidence.submission import Recomputed
from peers.validator.recompute import Found
from swarm.wire.manifest import Sampling
from tests.commands.harness import swarm

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
    measurement = Measurement(policy, Workload(policy, SAMPLING), 3, Kept(None))
    honest, cheats = measurement.honest([FP32]), measurement.cheats(FP32)
    thresholds = propose(list(honest.values()))
    for samples in honest.values():
        assert assess(samples, thresholds).refused == 0
    for name, samples in cheats.items():
        judged = assess(samples, thresholds)
        if not name.startswith("takes near ties"):  # that takes more submissions to see
            assert judged.refused > 0 or judged.tokens_until_eviction is not None, name
    pre_generated = assess(cheats["pre-generated"], thresholds)
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


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_thresholds(policy: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "thresholds.toml", tmp_path / "roc.png"
    arguments = ["--model", policy, "--environment", "sort-digits@1", "--tokens", "8"]
    small = ["--groups", "2", "--group-size", "4", "--engines", "float32"]
    small += ["--keep", str(tmp_path / "kept")]
    given = [*map(str, arguments), *small]
    shown = swarm("proofs", "calibrate", *given, "--out", out)
    assert shown.status == 0, shown.errors
    assert "float32 cpu → float32 cpu" in shown.output and "pre-generated" not in shown.output
    found = tomllib.loads(out.read_text())["thresholds"]
    assert found["measured_dtypes"] == ["float32"] and 8 <= found["measured_tokens"] <= 64
    shown = swarm("proofs", "calibrate", *given, "--cheats", "--plot", plot)
    assert "pre-generated" in shown.output and "[thresholds]" in shown.output, shown.errors
    assert plot.read_bytes().startswith(b"\x89PNG")
    told = swarm("proofs", "calibrate", *given, "--cheats", "--json")
    assert json.loads(told.output)["attacks"]["pre-generated"]["refused"] > 0


class Stopped(Exception):
    """Somebody pressed Ctrl-C."""


def test_a_stopped_measurement_goes_on_where_it_stopped(policy: Path, tmp_path: Path) -> None:
    """What is kept is not computed again: the last one has no model to compute with."""
    classes, workload = [FP32, BF16], Workload(policy, SAMPLING)
    whole = Measurement(policy, workload, 2, Kept(None)).honest(classes)
    rows: list[str] = []

    def stop_at_the_third(row: str, _samples: list[Sample]) -> None:
        rows.append(row)
        if len(rows) == 3:
            raise Stopped

    kept = Kept(tmp_path / "kept", "basis")
    with pytest.raises(Stopped):
        Measurement(policy, workload, 2, kept).honest(classes, stop_at_the_third)
    assert rows == ["float32 cpu → float32 cpu"] * 2 + ["float32 cpu → bfloat16 cpu"]
    files = {each: each.stat().st_mtime_ns for each in (tmp_path / "kept").rglob("*.msgpack")}
    assert len(files) == 2 + 3, "two submissions, recomputed three times in all"
    resumed = Measurement(policy, workload, 2, kept).honest(classes)
    assert all(each.stat().st_mtime_ns == before for each, before in files.items())
    without_model = Measurement(tmp_path / "no model", workload, 2, kept).honest(classes)
    for found in (resumed, without_model):
        assert list(found) == list(whole) and len(found) == 4
        for row, samples in found.items():
            for ours, theirs in zip(samples, whole[row], strict=True):
                assert np.array_equal(ours.found.margins, theirs.found.margins)
                assert ours.found.chunks == theirs.found.chunks


def test_a_result_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    kept, made = Kept(tmp_path, "basis"), HandedIn([[1, 2]], [[b"proof"]])
    assert kept.handed_in("worker", 0, lambda: made) == made
    file = next(tmp_path.rglob("*.msgpack"))
    file.write_bytes(file.read_bytes()[:-1])
    assert kept.handed_in("worker", 0, lambda: made) == made
    assert Kept(tmp_path, "another basis").handed_in("worker", 0, lambda: HandedIn([], [])) != made


@given(st.integers(0, 40), st.floats(0.003, 0.05), st.floats(0.02, 0.2), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_a_few_thousand_honest_tokens_give_bounds_that_hold_for_many(
    more: int, share: float, scale: float, seed: int
) -> None:
    """Margins of a share of the tokens, exponential, and errors around a mean."""
    drawn = np.random.default_rng(seed)
    limits = propose([[rounded_sample(drawn, 48 + more, share, scale)]])
    judged = assess([rounded_sample(drawn, 64, share, scale) for _ in range(20)], limits)
    assert judged.refused == 0, judged.refused_by
    assert judged.tokens_until_eviction is None
    assert judged.margin_max < limits.margin_max


def rounded_sample(drawn: np.random.Generator, rollouts: int, share: float, scale: float) -> Sample:
    """A submission of an honest engine whose rounding has these figures."""
    lengths = [64] * rollouts
    tokens = sum(lengths)
    margins = np.where(drawn.random(tokens) < share, drawn.exponential(scale, tokens), 0.0)
    errors = drawn.normal(0.03, 0.005, 2 * rollouts).clip(0.0, 1.0)
    chunks = [ChunkResult(122, 1.5, 1.0, 0, float(error), True) for error in errors]
    ties: list[list[bool]] = [[] for _ in lengths]
    outcomes = [[[0.0] * rollouts], [[0.0] * rollouts], [[float(each) for each in lengths]]]
    found = Found(chunks, errors, margins, ties)
    return Sample(found, Recomputed(margins, errors, [ties], outcomes), rollouts)


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
