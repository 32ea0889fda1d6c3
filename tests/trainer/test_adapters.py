"""A run that trains adapters: what moves, what is held, written and resumed, and who reads it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from benchmarks.groups import make_batch
from peers.engines.adapter import WEIGHTS_FILE
from peers.engines.engine import Engine
from peers.engines.model import read_weights
from peers.engines.native import NativeEngine
from peers.learning.learner import Learner
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from swarm.wire.manifest import Adapter
from tests.engines.adapters import change_config, save_random_adapter
from tests.engines.families import SUPPORTED, save_random
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import random_groups, settings, teach, weights_of

ADAPTER = Adapter(rank=4, alpha=8.0)


def adapted(adapter: Adapter = ADAPTER, **changes: Any) -> LearnerSettings:
    sharding = Sharding(**changes.pop("sharding", {}))
    return dataclasses.replace(
        settings(learning_rate=3e-3, kl_coefficient=0.01, **changes),
        adapter=adapter,
        sharding=sharding,
    )


def learn(learner: Learner, steps: range) -> list[dict[str, float]]:
    return [teach(learner, random_groups(s, policy=max(0, s - 1)), s, [str(s)]) for s in steps]


def engine_sees_what_the_learner_scores(engine: Engine, learner: Learner) -> None:
    """Log-probabilities of a rollout under the policy that the engine has loaded."""
    groups = random_groups(5, policy=2)
    rollout = groups[0].rollouts[0]
    count = len(rollout.model_tokens)
    passes = learner.policy.passes(make_batch(groups))
    found = learner.policy.score(passes)[:count]
    indices = range(len(rollout.tokens) - count, len(rollout.tokens))
    states = engine.prefill([rollout.tokens], [indices]).states[0]
    log_all = torch.log_softmax(engine.logits(states), -1)
    log_pi = log_all[range(count), torch.tensor(rollout.model_tokens)]
    torch.testing.assert_close(log_pi, found, rtol=0, atol=2e-5)


def test_only_the_adapters_move_and_engines_see_what_was_learnt(base: Path, tmp_path: Path) -> None:
    learner = Learner(base, adapted())
    before = weights_of(learner)
    learner.export(tmp_path / "0")
    learn(learner, range(2))
    learner.export(tmp_path / "2")
    after = weights_of(learner)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if ".lora_" in name} == set(learner.policy.trained())

    assert not (tmp_path / "0" / WEIGHTS_FILE).exists()  # policy 0 is the base, bit for bit
    stored = read_weights(base)
    assert all(torch.equal(value, stored[n]) for n, value in read_weights(tmp_path / "0").items())
    names = {path.name for path in (tmp_path / "2").iterdir()}
    assert {WEIGHTS_FILE, "adapter_config.json", "config.json", "tokenizer.json"} <= names
    assert not any(name.startswith("model") for name in names)
    assert learner.matches(tmp_path / "2") and not learner.matches(tmp_path / "0")
    learner.export(tmp_path / "again", base=True)
    for path in (tmp_path / "0").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()

    change_config(tmp_path / "2", base_model_name_or_path=str(tmp_path / "0"))
    engine_sees_what_the_learner_scores(NativeEngine(tmp_path / "2"), learner)


def test_past_policies_and_the_reference_are_adapters_on_one_base(base: Path) -> None:
    learner = Learner(base, adapted())
    learn(learner, range(2))
    reference = learner.past.reference
    assert reference is not None
    held = {**learner.past.held, -1: reference}
    sizes = {sum(value.nbytes for value in weights.values()) for weights in held.values()}
    assert sizes == {sum(value.nbytes for value in learner.policy.weights().values())}

    passes = learner.policy.passes(make_batch(random_groups(5, policy=1)))
    newest = learner.policy.score(passes)
    plain = Learner(base, settings()).policy.score(passes)
    for number, weights in held.items():
        (found,) = learner.past.score(weights, [passes])
        assert torch.equal(found, plain) == (number <= 0)  # as policy 0, the reference adds nothing
        assert torch.equal(found, newest) == (number == 2)
    assert torch.equal(learner.policy.score(passes), newest)  # it got its own adapter back


def test_a_frozen_base_is_less_work(base: Path) -> None:
    whole, thin = (
        teach(Learner(base, chosen), random_groups(0, policy=0), 0)["model_flops"]
        for chosen in (settings(), adapted())
    )
    assert 4 / 6 < thin / whole < 1  # the base gets no gradients


def test_it_resumes_bit_for_bit(base: Path, tmp_path: Path) -> None:
    chosen = adapted(optimiser_steps=2)
    through = Learner(base, chosen)
    expected = learn(through, range(2))
    through.export(tmp_path / "2")
    through.save(tmp_path / "state")
    expected += learn(through, range(2, 4))

    again = Learner(base, chosen)
    again.export(tmp_path / "0")
    learn(again, range(1))
    again.export(tmp_path / "1")
    resumed = Learner(base, chosen)
    folders = {int(folder.name): folder for folder in tmp_path.glob("[0-9]")}
    resumed.load(tmp_path / "state", folders)
    assert learn(resumed, range(2, 4)) == expected[2:]
    left, right = weights_of(through), weights_of(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)
    size = sum(path.stat().st_size for path in (tmp_path / "state").glob("*.safetensors"))
    trained = sum(value.numel() for value in through.policy.trained().values())
    assert size < 3 * 4 * trained + 100_000  # weights and two moments of the adapters alone


@pytest.mark.slow
def test_a_frozen_base_keeps_its_dtype_under_mixed_precision(tmp_path: Path) -> None:
    save_random(SUPPORTED["qwen2"], tmp_path / "fp32", 1)
    base = _in_bfloat16(tmp_path / "fp32", tmp_path / "base")

    def work(ranks: Ranks) -> set[tuple[bool, torch.dtype]]:
        sharding = {"mixed_precision": True, "activation_checkpointing": True}
        learner = Learner(base, adapted(sharding=sharding), ranks=ranks)
        learn(learner, range(2))
        return {(p.requires_grad, p.dtype) for p in learner.model.parameters()}

    (found,) = run_ranks(1, tmp_path, work)
    assert found == {(True, torch.float32), (False, torch.bfloat16)}


def _in_bfloat16(folder: Path, target: Path) -> Path:
    target.mkdir()
    weights = {name: value.bfloat16() for name, value in read_weights(folder).items()}
    safetensors.torch.save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = (folder / "config.json").read_text().replace('"float32"', '"bfloat16"')
    (target / "config.json").write_text(config)
    return target


@pytest.mark.slow
def test_two_ranks_train_the_same_adapters(base: Path, tmp_path: Path) -> None:
    alone = Learner(base, adapted())
    expected = learn(alone, range(3))
    alone.export(tmp_path / "alone")

    def work(ranks: Ranks) -> list[dict[str, float]]:
        learner = Learner(base, adapted(), ranks=ranks)
        metrics = learn(learner, range(3))
        learner.export(tmp_path / "policy")
        assert learner.matches(tmp_path / "policy")
        return metrics

    for metrics in run_ranks(2, tmp_path, work):
        for found, wanted in zip(metrics, expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
    for folder in ("alone", "policy"):
        change_config(tmp_path / folder, base_model_name_or_path=str(base))
    ours, theirs = (read_weights(tmp_path / folder) for folder in ("policy", "alone"))
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-5) for name in ours)


# --- refusals --------------------------------------------------------------------------------


def test_what_cannot_be_adapted_is_refused(base: Path, tmp_path: Path) -> None:
    save_random(SUPPORTED["qwen3-moe"], tmp_path, 1)
    with pytest.raises(UserError, match=r"targets names gate_proj, which no layer of this model"):
        Learner(tmp_path, adapted())
    with pytest.raises(UserError, match=r"trainer.tensor_parallel is 2, and the run trains"):
        Learner(base, adapted(sharding={"tensor_parallel": 2}))


def test_an_adapter_is_no_base(base: Path, tmp_path: Path) -> None:
    """Only its base's weights would be read, or published as policy 0."""
    folder = save_random_adapter(base, tmp_path / "adapter", rank=4)
    for chosen in (settings(), adapted()):
        with pytest.raises(UserError, match="holds an adapter, not a whole model; merge it into"):
            Learner(folder, chosen)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Adapter(rank=2, alpha=4.0), "its rank is 2, not 4"),
        (Adapter(rank=4, alpha=4.0), "its alpha / rank is 1.0, not 2.0"),
        (Adapter(rank=4, alpha=8.0, targets=["q_proj"]), r"its targets is \['q_proj'\], not"),
    ],
)
def test_another_runs_adapter_is_refused(
    other: Adapter, words: str, base: Path, tmp_path: Path
) -> None:
    learner = Learner(base, adapted(other))
    learn(learner, range(1))
    learner.export(tmp_path / "other")
    with pytest.raises(UserError, match=f"adapter of another run: {words}"):
        Learner(base, adapted()).matches(tmp_path / "other")
