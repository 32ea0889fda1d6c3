"""Past policies live in host memory, and reach the device only while they score."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.groups import make_batch
from peers.engines.loading import load as load_model
from peers.learning.host import PAGE_BYTES, HostMemory, host_tensor
from peers.learning.learner import Learner
from peers.learning.scorer import Scorer
from tests.trainer.test_learner import SETTINGS, random_groups, run_steps, settings


def spare_bytes(learner: Learner) -> int:
    spare = learner.past._spare
    return sum(value.untyped_storage().nbytes() for value in spare.parameters())


def test_scores_are_those_of_a_model_of_its_own(base: Path) -> None:
    learner = Learner(base, SETTINGS)
    run_steps(learner, [0, 1])
    batch = make_batch(random_groups(5, policy=1))
    passes = learner.policy.passes(batch)
    model = load_model(base).float().eval()
    for policy in (0, 1, 2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(learner.past.held[policy][name])
            expected = torch.empty(batch.token_count())
            for rows in passes:
                expected[rows.index] = Scorer(model)(rows, entropy=False)[0]
        (found,) = learner.past.score(learner.past.held[policy], [passes])
        assert torch.equal(found, expected)
    assert torch.equal(learner.policy.score(passes), expected)  # policy 2 is the learner


def test_the_spare_model_holds_memory_only_while_it_scores(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(base, settings(kl_coefficient=0.01))
    during = []
    forward = Scorer.forward

    def watched(self: Scorer, *arguments: object, **named: object) -> object:
        gradients = [value.grad is not None for value in learner.model.parameters()]
        during.append((self is learner.past.scorer, spare_bytes(learner), any(gradients)))
        return forward(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Scorer, "forward", watched)
    assert spare_bytes(learner) == 0
    run_steps(learner, [0, 1, 2])
    assert spare_bytes(learner) == 0
    size = sum(value.nbytes for value in learner.model.parameters())
    assert {found[:2] for found in during} == {(True, size), (False, 0)}
    assert not any(gradients for scoring, _, gradients in during if scoring)


def test_the_memory_of_dropped_policies_is_used_again(base: Path) -> None:
    learner = Learner(base, SETTINGS)
    held = SETTINGS.schedule.max_staleness + 2
    run_steps(learner, range(held - 1))
    buffers = {weights["model.norm.weight"].data_ptr() for weights in learner.past.held.values()}
    assert len(buffers) == held
    run_steps(learner, range(held - 1, held + 1))
    assert learner.policies == list(range(2, held + 2))
    assert buffers == {
        weights["model.norm.weight"].data_ptr() for weights in learner.past.held.values()
    }


def test_a_copy_in_host_memory_is_one_buffer_in_the_published_dtype() -> None:
    weights = {"a": torch.randn(3, 5), "empty": torch.empty(0, 4), "b": torch.randn(7)}
    memory = HostMemory(torch.device("cpu"), torch.bfloat16, weights)
    copy = memory.copy(weights)
    assert all(torch.equal(copy[name], weights[name].bfloat16()) for name in weights)
    assert len({value.untyped_storage().data_ptr() for value in copy.values()}) == 1
    again = memory.copy({name: value + 1 for name, value in weights.items()})
    assert all(torch.equal(copy[name], weights[name].bfloat16()) for name in weights)
    memory.reuse(copy)
    assert memory.copy(weights) is copy
    assert torch.equal(again["b"], (weights["b"] + 1).bfloat16())


@pytest.mark.parametrize("elements", [0, 1, 1024, 5000])
def test_memory_of_the_host_has_pages_of_its_own(elements: int) -> None:
    made = [host_tensor(elements, torch.float32, torch.device("cpu")) for _ in range(3)]
    pages: set[int] = set()
    for each in made:
        assert each.shape == (elements,) and each.dtype == torch.float32
        assert each.untyped_storage().nbytes() >= each.nbytes + PAGE_BYTES
        if elements:
            first = each.data_ptr() // PAGE_BYTES
            assert each.data_ptr() % PAGE_BYTES == 0
            mine = set(range(first, first + -(-each.nbytes // PAGE_BYTES)))
            assert not mine & pages
            pages |= mine
