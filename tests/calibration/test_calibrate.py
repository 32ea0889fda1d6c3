"""Calibration: thresholds accept honest engines, also deep ones in bf16, and show cheats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from peers.calibration.calibrate import EngineClass, engine_classes, measure_pairs, propose
from peers.engines import demo
from peers.proofs.toploc import ChunkResult
from peers.validator.evidence.submission import Recomputed
from peers.validator.recompute import Found
from swarm.errors import UserError
from swarm.wire.manifest import Sampling
from tests.attacks.assessment import Judged, area, assess, judge
from tests.attacks.cheats import Generates, RandomWorkload, attacks

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
def test_fp32_thresholds_accept_honest_work_and_refuse_each_cheat(
    policy: Path, tmp_path: Path
) -> None:
    workload, engine = RandomWorkload(policy, SAMPLING), FP32.engine(policy)
    honest = [judge(Generates(engine), engine, workload, number) for number in range(3)]
    thresholds = propose([honest])
    assert assess(honest, thresholds).refused == 0
    for name, cheat in attacks(policy, tmp_path, FP32):
        judged = assess([judge(cheat, engine, workload, number) for number in range(3)], thresholds)
        if not name.startswith("takes near ties"):  # that takes more submissions to see
            assert judged.refused > 0 or judged.tokens_until_eviction is not None, name
        if name == "pre-generated":
            assert judged.tokens_until_eviction is not None


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
    workload, engine = RandomWorkload(tmp_path, SAMPLING), BF16.engine(tmp_path)
    worker = Generates(engine)
    measured = [judge(worker, engine, workload, number) for number in range(6)]
    tried = [judge(worker, engine, workload, number, "other") for number in range(8)]
    assert min(chunk.exponent_matches for each in tried for chunk in each.found.chunks) < 125
    judged = assess(tried, propose([measured]))
    assert judged.refused == 0, judged.refused_by
    assert judged.tokens_until_eviction is None
    assert judged.log_capital < 3


def test_every_pair_of_engine_classes_is_measured(policy: Path) -> None:
    rows: list[str] = []
    done: list[tuple[int, int]] = []
    found = measure_pairs(
        policy,
        RandomWorkload(policy, SAMPLING),
        [FP32, BF16],
        rows.append,
        lambda pairs, of: done.append((pairs, of)),
    )
    names = [
        f"{worker.name} → {validator.name}"
        for worker, validator in ((FP32, FP32), (FP32, BF16), (BF16, BF16), (BF16, FP32))
    ]
    assert list(found) == names
    assert all(row.startswith(name) for name, row in zip(names, rows[1:], strict=True))
    assert done[-1] == (4, 4)
    assert found[names[0]].found.margins.max() <= found[names[1]].found.margins.max()


def test_every_named_attack_can_run(policy: Path, tmp_path: Path) -> None:
    names = [name for name, _ in attacks(policy, tmp_path, FP32, previous=[policy])]
    assert {f"older policy {policy.name}", "top-p 0.95", "best of 4", "int8 weights"} <= set(names)


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


def rounded_sample(drawn: np.random.Generator, rollouts: int, share: float, scale: float) -> Judged:
    """A submission of an honest engine whose rounding has these figures."""
    lengths = [64] * rollouts
    tokens = sum(lengths)
    margins = np.where(drawn.random(tokens) < share, drawn.exponential(scale, tokens), 0.0)
    errors = drawn.normal(0.03, 0.005, 2 * rollouts).clip(0.0, 1.0)
    chunks = [ChunkResult(122, 1.5, 1.0, 0, float(error), True) for error in errors]
    ties: list[list[bool]] = [[] for _ in lengths]
    outcomes = [[[0.0] * rollouts], [[0.0] * rollouts], [[float(each) for each in lengths]]]
    found = Found(chunks, errors, margins, ties)
    return Judged(found, lengths, Recomputed(margins, errors, [ties], outcomes))


def test_an_unknown_engine_class_is_one_sentence() -> None:
    with pytest.raises(UserError, match="float99"):
        engine_classes(["float99"])


def test_the_area_under_the_curve() -> None:
    assert area([0.0, 1.0], [2.0]) == 1.0
    assert area([0.0, 1.0], [0.5]) == 0.5
