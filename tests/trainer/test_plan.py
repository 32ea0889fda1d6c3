"""The plan of a trainer's memory is what a tiny trainer then holds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from peers.engines.demo import save_tokenizer
from peers.engines.loading import blank
from peers.learning.activations import Pass, activations
from peers.learning.learner import Learner
from peers.learning.live import LiveMemory
from peers.learning.packing import Rows
from peers.learning.plan import GB, Machine, Model, Workload, plan
from peers.learning.ranks import Ranks
from peers.learning.scorer import Scorer
from peers.learning.sharding import local, recompute
from swarm.errors import UserError
from swarm.jobs.memory import MemoryPlan
from swarm.jobs.training import Sharding
from swarm.wire.manifest import Adapter
from tests.engines.families import SUPPORTED, save_random
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import random_groups, run_steps, settings, teach
from tests.trainer.test_sharded import family
from tests.trainer.test_stored import uneven

__all__ = ["uneven"]  # a fixture

QWEN_32B: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""Shape of Qwen2.5-32B."""

ON_CPU = Machine("cpu")
WORK = Workload(tokens=64, longest=64, held=4, reference=True)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of a 32 B model, without weights."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(QWEN_32B))
    return folder


def part(found: MemoryPlan, name: str) -> int:
    """Bytes of a part, in the first phase that has it."""
    return next(each.bytes for each in found.parts if each.name == name)


def size(tensors: Mapping[Any, Tensor]) -> int:
    return sum(local(value).nbytes for value in tensors.values())


def held(learner: Learner) -> dict[str, int]:
    """Bytes that a learner holds, by the plan's parts."""
    parameters = dict(learner.model.named_parameters())
    moments = [
        value for state in learner.policy.optimiser.state.values() for value in state.values()
    ]
    policies = [*learner.past.held.values(), learner.past.reference]
    return {
        "weights, fp32": size(parameters),
        "gradients, fp32": size(
            {name: value.grad for name, value in parameters.items() if value.grad is not None}
        ),
        "optimiser states": size(dict(enumerate(moments))),
        "past policies and reference": sum(size(dict(weights or {})) for weights in policies),
        "buffers": size(dict(learner.model.named_buffers())),
        "copy of the training state": size(learner.policy.state()),
    }


@pytest.mark.parametrize("which", ["base", "uneven"])
@pytest.mark.parametrize("optimiser", ["adamw", "adamw8bit"])
def test_a_tiny_trainer_holds_what_was_planned(
    request: pytest.FixtureRequest, which: str, optimiser: Any
) -> None:
    if optimiser == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    folder: Path = request.getfixturevalue(which)
    sharding = Sharding(optimiser=optimiser)
    chosen = dataclasses.replace(settings(kl_coefficient=0.1), sharding=sharding)
    learner = Learner(folder, chosen)
    run_steps(learner, range(4))
    work = dataclasses.replace(WORK, held=chosen.schedule.max_staleness + 2)
    found = plan(Model(folder), sharding, ON_CPU, work)
    assert {name: part(found, name) for name in held(learner)} == held(learner)
    learner.past._allocate()
    spare = {name: local(value) for name, value in learner.past._spare.named_parameters()}
    assert part(found, "spare model, fp32") == size(spare)


def test_a_trainer_of_adapters_holds_what_was_planned(base: Path) -> None:
    chosen = dataclasses.replace(settings(kl_coefficient=0.1), adapter=Adapter(rank=4))
    learner = Learner(base, chosen)
    run_steps(learner, range(4))
    work = dataclasses.replace(WORK, held=chosen.schedule.max_staleness + 2)
    found = plan(Model(base, 4), Sharding(), ON_CPU, work)
    trained = size(dict(learner.policy.trained()))
    everything = held(learner)
    assert part(found, "weights of the frozen base") == everything.pop("weights, fp32") - trained
    assert {name: part(found, name) for name in everything} == everything
    assert part(found, "adapters, fp32") == part(found, "copy of the adapters, fp32") == trained
    whole = plan(Model(base), Sharding(), ON_CPU, work)
    name = "activations and logits"
    assert part(found, name) < 1.2 * part(whole, name)
    assert found.host_bytes < whole.host_bytes and found.parameters == whole.parameters


def test_a_teacher_of_another_size_holds_what_was_planned(base: Path, uneven: Path) -> None:
    """Its weights in main memory; in fp32, with its activations, only while it is asked."""
    save_tokenizer(uneven)
    made = dataclasses.replace(settings(teacher_weight=0.5), teacher=str(uneven))
    learner = Learner(base, made)
    run_steps(learner, range(2))
    work = dataclasses.replace(WORK, reference=0, teacher=Model(uneven))
    found = plan(Model(base), Sharding(), ON_CPU, work)
    teacher = learner.past.teacher
    assert teacher is not None
    assert part(found, "teacher's weights") == size(teacher._weights)
    teacher._past._allocate()
    spare = {name: local(value) for name, value in teacher._past._spare.named_parameters()}
    asked = {each.name: each.bytes for each in found.parts if each.phase == "asking"}
    assert asked["teacher's spare model, fp32"] == size(spare)
    alone = plan(Model(uneven), Sharding(), ON_CPU, WORK)
    name = "activations and logits, without gradients"
    assert asked[f"teacher's {name}"] == part(alone, name)
    without = plan(Model(base), Sharding(), ON_CPU, dataclasses.replace(work, teacher=None))
    more = size(teacher._weights) + part(found, "teacher's buffers")
    assert found.host_bytes >= without.host_bytes + more


def test_each_of_two_ranks_holds_what_was_planned(uneven: Path, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> dict[str, int]:
        learner = Learner(uneven, settings(kl_coefficient=0.1), ranks=ranks)
        teach(learner, random_groups(0, policy=0), 0)
        return held(learner)

    found = plan(Model(uneven), Sharding(), Machine("cpu", 2, 2), dataclasses.replace(WORK, held=2))
    first, _second = run_ranks(2, tmp_path, work)  # the first has the larger parts
    assert {name: part(found, name) for name in first} == first


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param("Qwen3", 2, marks=pytest.mark.slow),
        pytest.param("Llama", 4, marks=pytest.mark.long),
    ],
)
def test_each_rank_with_divided_matrices_holds_what_was_planned(
    tmp_path: Path, kind: str, world: int
) -> None:
    folder = family(tmp_path / "base", kind)
    sharding = Sharding(tensor_parallel=2)
    chosen = dataclasses.replace(settings(kl_coefficient=0.1), sharding=sharding)

    def work(ranks: Ranks) -> dict[str, int]:
        learner = Learner(folder, chosen, ranks=ranks)
        teach(learner, random_groups(0, policy=0), 0)
        return held(learner)

    found = plan(
        Model(folder), sharding, Machine("cpu", world, world), dataclasses.replace(WORK, held=2)
    )
    first, *_ = run_ranks(world, tmp_path, work)
    assert {name: part(found, name) for name in first} == first


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(num_hidden_layers=6, num_key_value_heads=2, max_position_embeddings=256),
        Qwen3Config(num_hidden_layers=2, num_key_value_heads=1, head_dim=24),
        LlamaConfig(num_hidden_layers=5, num_key_value_heads=4, head_dim=32),
    ],
    ids=["qwen2", "qwen3", "llama"],
)
def test_activations_are_what_a_pass_saves(
    config: PretrainedConfig, recomputes: bool, tmp_path: Path
) -> None:
    config.update(
        {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    )
    config.save_pretrained(tmp_path)
    tokens = 200
    model = blank(tmp_path, torch.float32).eval()
    found = activations(model, Pass(tokens, torch.float32, recomputes, "cpu"))

    model = blank(tmp_path, torch.float32).eval().to_empty(device="cpu")
    if recomputes:
        for layer in model.model.layers:
            recompute(layer)
    row = torch.randint(0, 300, (tokens,))
    order = torch.arange(tokens)
    rows = Rows(row[None], order[None], row[None] * 0, False, order, row, order, order, order)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    known = [*model.parameters(), *model.buffers(), row, order, *vars(rows).values()]
    with LiveMemory(each for each in known if isinstance(each, Tensor)) as live:
        log_pi, entropy = Scorer(model)(rows, entropy_gradient=True)
        (log_pi.sum() + entropy.sum()).backward()
    assert found.training == pytest.approx(live.peak, rel=0.1)


def test_32_b_parameters_from_the_config_alone(large: Path) -> None:
    model = Model(large)
    eight = Machine("cuda", ranks=8, ranks_here=8, device_limit=80 * GB, host_limit=1500 * GB)
    work = Workload(tokens=1 << 14, longest=1 << 14, held=6, reference=True)
    sharding = Sharding(mixed_precision=True, activation_checkpointing=True)
    found = plan(model, sharding, eight, work)
    assert found.parameters == 32_763_876_352
    share = found.parameters / 8
    assert part(found, "weights, fp32") == pytest.approx(4 * share, rel=1e-3)
    assert part(found, "optimiser states") == pytest.approx(8 * share, rel=1e-3)
    assert part(found, "past policies and reference") == pytest.approx(7 * 2 * share, rel=1e-3)
    inputs = 64 * work.tokens * 5120 * 2  # of each layer, in bf16
    assert inputs < part(found, "activations and logits") < 2 * inputs
    assert found.problem == (
        f"each of the ranks needs {found.device_bytes / GB:.0f} GB of device memory, "
        f"{found.device_bytes / GB - 80:.1f} GB more than its 80.0 GB; less is needed with "
        'trainer.optimiser = "adamw8bit", trainer.cpu_offload = true, more ranks'
    )
    small = plan(model, Sharding(optimiser="adamw8bit", **_of(sharding)), eight, work)
    assert small.problem == "" and small.device_bytes < 80 * GB
    with_16 = dataclasses.replace(eight, ranks=16)
    assert plan(model, sharding, with_16, work).problem == ""


def _of(sharding: Sharding) -> dict[str, Any]:
    names = ("mixed_precision", "activation_checkpointing")
    return {name: getattr(sharding, name) for name in names}


def test_what_does_not_fit_is_said(large: Path) -> None:
    model, work = Model(large), Workload(1 << 15, longest=1 << 12, held=6, reference=True)
    machine = Machine("cuda", 8, 8, host_limit=600 * GB)
    problem = plan(model, Sharding(mixed_precision=True), machine, work).problem
    assert problem.startswith("the 8 ranks of a machine need 941 GB of main memory, 341 GB more")
    assert "trainer.activation_checkpointing = true, trainer.pass_tokens = 4096" in problem
    with pytest.raises(UserError, match=r"trainer\.replicas is 3, which does not divide the 8"):
        plan(model, Sharding(replicas=3), machine, work)


def test_divided_experts_are_not_gathered(tmp_path: Path) -> None:
    save_random(SUPPORTED["qwen3-moe"], tmp_path, seed=2)
    machine, work = Machine("cuda", 4, 4), Workload(tokens=64, longest=64, held=1, reference=False)
    whole, divided = (
        plan(Model(tmp_path), Sharding(expert_parallel=each), machine, work)
        for each in (False, True)
    )
    assert part(divided, "weights, gathered") < part(whole, "weights, gathered")
    assert part(divided, "weights, fp32") == part(whole, "weights, fp32")


def test_divided_matrices_are_planned(large: Path) -> None:
    """Tensor parallelism divides the layers' matrices and their results, but not their inputs, nor
    the embedding and the head, which fewer ranks then share."""
    machine = Machine("cuda", 8, 8)
    work = Workload(tokens=1 << 14, longest=1 << 14, held=6, reference=True)
    sharding = Sharding(mixed_precision=True, activation_checkpointing=True)
    whole, divided = (
        plan(Model(large), msgspec.structs.replace(sharding, tensor_parallel=each), machine, work)
        for each in (1, 4)
    )
    assert whole.parameters == divided.parameters
    assert 1.1 < part(divided, "weights, fp32") / part(whole, "weights, fp32") < 1.2
    assert part(divided, "weights, gathered") < 0.7 * part(whole, "weights, gathered")
    scoring = "activations and logits, without gradients"
    assert part(divided, scoring) < 0.7 * part(whole, scoring)
    with pytest.raises(UserError, match=r"tensor_parallel is 3, which does not divide the model's"):
        plan(Model(large), Sharding(tensor_parallel=3), Machine("cuda", 9, 9), work)


def test_shared_tokens_are_planned(large: Path) -> None:
    work = Workload(tokens=1 << 14, longest=1 << 14, held=6, reference=True)
    whole, shared = (
        plan(Model(large), Sharding(sequence_parallel=each), Machine("cuda", 8, 8), work)
        for each in (1, 8)
    )
    for name in ("weights, fp32", "weights, gathered", "optimiser states"):
        assert part(shared, name) == part(whole, name)
    activations = "activations and logits"
    assert 1 / 8 <= part(shared, activations) / part(whole, activations) < 0.2
    with pytest.raises(UserError, match=r"parallel is 96, which is more than the model's"):
        plan(Model(large), Sharding(sequence_parallel=96), Machine("cuda", 96, 8), work)
