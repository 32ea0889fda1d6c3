"""A policy spread over two ranks learns what one process alone learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.groups import as_accepted
from peers.engines.demo import make_policy
from peers.engines.loading import decoder_layers
from peers.engines.loading import load as load_model
from peers.engines.model import read_weights
from peers.engines.native import NativeEngine
from peers.learning import packing
from peers.learning.learner import Learner
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings
from peers.learning.sharding import whole
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from tests.engines.families import SUPPORTED, save_random
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import random_groups, settings, teach

Weights = dict[str, torch.Tensor]


def chosen(**sharding: Any) -> LearnerSettings:
    return dataclasses.replace(
        settings(
            optimiser_steps=2,
            kl_coefficient=0.01,
            entropy_coefficient=0.001,
            advantage="batch",  # which counts the completions of all ranks
            average="completions",
        ),
        sharding=Sharding(**sharding),
    )


def learn(learner: Learner, steps: Sequence[int]) -> list[dict[str, float]]:
    """Uneven batches; the last step has fewer sequences than there are passes elsewhere."""
    return [
        teach(
            learner,
            random_groups(step, policy=max(0, step - 2), count=5 - step, size=3),
            step,
            [str(step)],
        )
        for step in steps
    ]


def everything(learner: Learner) -> tuple[Weights, Weights]:
    """All weights and all gradients of the last optimiser step (as clipped)."""
    parameters = dict(learner.model.named_parameters())
    weights = {name: whole(value.detach()).clone() for name, value in parameters.items()}
    gradients = {
        name: whole(value.grad).clone()
        for name, value in parameters.items()
        if value.grad is not None
    }
    return weights, gradients


def close(left: Weights, right: Weights, tolerance: float = 2e-5) -> bool:
    return left.keys() == right.keys() and all(
        torch.allclose(left[name], right[name], atol=tolerance) for name in left
    )


@pytest.mark.parametrize(
    ("world", "sharding"),
    [
        (2, {}),
        pytest.param(2, {"replicas": 2, "activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(2, {"cpu_offload": True}, marks=pytest.mark.slow),
    ],
)
def test_ranks_learn_what_one_process_learns(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, sharding: Any
) -> None:
    monkeypatch.setattr(packing, "PASS_TOKENS_MAX", 30)  # several passes, not equally many
    alone = Learner(base, chosen())
    expected = learn(alone, range(3))
    expected_weights, expected_gradients = everything(alone)

    def work(ranks: Ranks) -> tuple[list[dict[str, float]], Weights, Weights]:
        learner = Learner(base, chosen(**sharding), ranks=ranks)
        metrics = learn(learner, range(3))
        learner.export(tmp_path / "policy")
        weights, gradients = everything(learner)
        return metrics, weights, gradients

    for metrics, weights, gradients in run_ranks(world, tmp_path, work):
        for found, wanted in zip(metrics, expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
        assert close(weights, expected_weights)
        assert close(gradients, expected_gradients, 1e-5)
    assert max(float(value.abs().max()) for value in expected_gradients.values()) > 1e-3

    published = read_weights(tmp_path / "policy")
    assert close(published, expected_weights)
    files = sorted(path.name for path in (tmp_path / "policy").glob("model*"))
    assert files == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    loaded = dict(load_model(tmp_path / "policy").named_parameters())
    assert close({name: value.detach() for name, value in loaded.items()}, expected_weights)
    NativeEngine(base).load_weights(tmp_path / "policy", 1)


def test_a_policy_is_written_while_a_pass_is_under_way(base: Path, tmp_path: Path) -> None:
    """The thread that writes frees nothing that the pass has gathered."""

    def work(ranks: Ranks) -> None:
        policy = Learner(base, chosen(), ranks=ranks).policy
        snapshot = policy.snapshot()
        (groups, *_) = as_accepted(random_groups(0, policy=0), "", ranks)
        (rows, *_) = policy.passes(groups.batch(groups.informative))
        last = decoder_layers(policy.model)[-1]
        last.register_forward_pre_hook(lambda *_: policy.write(tmp_path / "policy", snapshot))
        policy.scorer(rows)

    run_ranks(2, tmp_path, work)
    assert close(read_weights(tmp_path / "policy"), read_weights(base))


@pytest.mark.slow
def test_a_state_of_two_ranks_goes_on_with_one_and_the_other_way_round(
    base: Path, tmp_path: Path
) -> None:
    alone = Learner(base, chosen())
    expected = learn(alone, range(2))
    alone.export(tmp_path / "policy-2")
    alone.save(tmp_path / "of-one")
    expected += learn(alone, [2])
    expected_weights, _ = everything(alone)
    folders = {0: base, 2: tmp_path / "policy-2"}

    def save_with_two(ranks: Ranks) -> None:
        learner = Learner(base, chosen(), ranks=ranks)
        learn(learner, range(2))
        learner.save(tmp_path / "of-two")

    def go_on_with_two(ranks: Ranks) -> tuple[list[dict[str, float]], Weights]:
        learner = Learner(base, chosen(), ranks=ranks)
        learner.load(tmp_path / "of-one", folders)
        assert (learner.step, learner.consumed) == (2, {0: ["0"], 1: ["1"]})
        return learn(learner, [2]), everything(learner)[0]

    run_ranks(2, tmp_path, save_with_two)
    assert len(list((tmp_path / "of-two").glob("*.safetensors"))) == 2
    (tmp_path / "meeting").unlink()
    one = Learner(base, chosen())
    one.load(tmp_path / "of-two", folders)
    results = [(learn(one, [2]), everything(one)[0]), *run_ranks(2, tmp_path, go_on_with_two)]
    for metrics, weights in results:
        assert metrics[0] == pytest.approx(expected[2], abs=1e-4)
        assert close(weights, expected_weights)


def test_recomputing_changes_no_number(base: Path) -> None:
    plain, recomputing = (
        Learner(base, chosen(activation_checkpointing=how)) for how in (False, True)
    )
    for found, wanted in zip(learn(recomputing, range(2)), learn(plain, range(2)), strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    assert close(everything(recomputing)[0], everything(plain)[0], 1e-6)


def test_mixed_precision_keeps_fp32_master_weights(base: Path, tmp_path: Path) -> None:
    """One rank, bf16 passes: the weights stay fp32 and learn nearly the same."""
    alone = Learner(base, chosen())
    learn(alone, range(2))

    def work(ranks: Ranks) -> tuple[Weights, Weights]:
        learner = Learner(base, chosen(mixed_precision=True), ranks=ranks)
        learn(learner, range(2))
        return everything(learner)

    ((weights, gradients),) = run_ranks(1, tmp_path, work)
    expected, expected_gradients = everything(alone)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert {value.dtype for value in gradients.values()} == {torch.float32}
    mine = torch.cat([gradients[name].flatten() for name in sorted(gradients)])
    wanted = torch.cat([expected_gradients[name].flatten() for name in sorted(gradients)])
    assert float(torch.cosine_similarity(mine, wanted, dim=0)) > 0.98
    assert close(weights, expected, 5e-3)


def family(folder: Path, kind: str) -> Path:
    """A small model of a family that tensor or expert parallelism divides; Qwen3 has norms over
    heads."""
    import transformers

    if kind in SUPPORTED:
        save_random(SUPPORTED[kind], folder, seed=2)
        return folder

    make_policy(folder, seed=3)
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=kind == "Qwen3",
    )  # fmt: skip
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "sharding"),
    [
        ("Qwen3", 2, {"tensor_parallel": 2}),
        ("Llama", 2, {"tensor_parallel": 2, "activation_checkpointing": True}),
        ("Qwen3", 4, {"tensor_parallel": 2}),
        ("qwen3-moe", 2, {"expert_parallel": True, "activation_checkpointing": True}),
        ("qwen3-moe", 4, {"expert_parallel": True, "replicas": 2}),
        ("Qwen3", 2, {"sequence_parallel": 2, "activation_checkpointing": True}),
        ("Llama", 4, {"sequence_parallel": 4, "replicas": 2}),
        ("qwen3-window", 4, {"sequence_parallel": 2, "cpu_offload": True}),
        ("qwen3-moe", 4, {"sequence_parallel": 2, "expert_parallel": True}),
    ],
)
def test_divided_matrices_learn_what_one_process_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, world: int, sharding: Any
) -> None:
    """Also when both dimensions of the mesh divide them, and after a resume."""
    monkeypatch.setattr(packing, "PASS_TOKENS_MAX", 30)
    start = family(tmp_path / "base", kind)
    alone = Learner(start, chosen())
    expected = learn(alone, range(3))
    expected_weights, expected_gradients = everything(alone)

    def work(ranks: Ranks) -> tuple[list[dict[str, float]], Weights, Weights]:
        learner = Learner(start, chosen(**sharding), ranks=ranks)
        metrics = learn(learner, range(2))
        learner.export(tmp_path / "policy-2")
        learner.save(tmp_path / "state")
        again = Learner(start, chosen(**sharding), ranks=ranks)
        again.load(tmp_path / "state", {0: start, 2: tmp_path / "policy-2"})
        metrics += learn(again, [2])
        assert again.matches(tmp_path / "policy-2") is False
        weights, gradients = everything(again)
        return metrics, weights, gradients

    for metrics, weights, gradients in run_ranks(world, tmp_path, work):
        for found, wanted in zip(metrics, expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-4, rel=1e-5)
        assert close(weights, expected_weights)
        assert close(gradients, expected_gradients, 1e-5)


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused(tmp_path: Path, base: Path) -> None:
    def refused(ranks: Ranks, folder: Path) -> str:
        with pytest.raises(UserError) as caught:
            Learner(folder, chosen(tensor_parallel=3), ranks=ranks)
        return str(caught.value)

    (first, *_) = run_ranks(2, tmp_path, refused, base)
    assert first == (
        "trainer.tensor_parallel is 3, which does not divide the 2 ranks of a copy of the policy"
    )
    (tmp_path / "meeting").unlink()
    (first, *_) = run_ranks(3, tmp_path, refused, base)
    assert (
        first == "trainer.tensor_parallel is 3, which does not divide the model's 4 attention heads"
    )


@pytest.mark.slow
def test_experts_that_cannot_be_divided_are_refused(tmp_path: Path, base: Path) -> None:
    mixture = family(tmp_path / "mixture", "qwen3-moe")

    def refused(ranks: Ranks, folder: Path, **sharding: Any) -> str:
        with pytest.raises(UserError) as caught:
            Learner(folder, chosen(expert_parallel=True, **sharding), ranks=ranks)
        return str(caught.value)

    (first, *_) = run_ranks(2, tmp_path, refused, base)
    assert first == "trainer.expert_parallel is on, and the model has no experts; omit it"
    (tmp_path / "meeting").unlink()
    (first, *_) = run_ranks(3, tmp_path, refused, mixture)
    assert "4 experts cannot be divided over the 3 ranks of a copy; omit it" in first
    with pytest.raises(UserError, match=r"compile cannot be used with trainer\.expert_parallel"):
        Learner(mixture, chosen(expert_parallel=True, compile=True))
