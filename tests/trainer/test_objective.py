from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.trainer.objective import advantages, check, grpo
from swarm.errors import UserError
from swarm.messages import Objective

OBJECTIVE = Objective(kl_coefficient=0.3, entropy_coefficient=0.2)


def literal(
    objective: Objective,
    log_pi: Any,
    log_old: Any,
    advantage: Any,
    entropy: Any,
    log_reference: Any,
) -> float:
    """The formulas as they stand in the paper, token by token, in float64."""
    total = 0.0
    for pi, old, a, h, reference in zip(
        log_pi, log_old, advantage, entropy, log_reference, strict=True
    ):
        r = np.exp(np.clip(pi - old, -20, 20))
        low, high = 1 - objective.epsilon, 1 + objective.epsilon
        total -= min(min(r, objective.delta) * a, min(max(r, low), high) * a)
        d = min(reference - pi, 10)
        total += objective.kl_coefficient * (np.exp(d) - d - 1)
        total -= objective.entropy_coefficient * h
    return total / len(log_pi)


def random_tokens(seed: int, count: int = 400) -> list[torch.Tensor]:
    """log π, log old, advantage, entropy, log reference: far enough apart to reach every bound."""
    generator = torch.Generator().manual_seed(seed)
    log_pi = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    log_old = log_pi + torch.randn(count, generator=generator, dtype=torch.float64) * 1.5
    log_reference = log_pi + torch.randn(count, generator=generator, dtype=torch.float64) * 5
    advantage = torch.randn(count, generator=generator, dtype=torch.float64)
    entropy = torch.rand(count, generator=generator, dtype=torch.float64)
    log_old[0], log_old[1] = log_pi[0] - 100, log_pi[1] + 100
    return [log_pi, log_old, advantage, entropy, log_reference]


def loss_of(objective: Objective, tokens: list[torch.Tensor]) -> torch.Tensor:
    log_pi, log_old, advantage, entropy, log_reference = tokens
    loss, _ = grpo(
        objective, log_pi, log_old, advantage, entropy, len(log_pi), log_old, log_reference
    )
    return loss


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_literal_formulas(seed: int) -> None:
    tokens = random_tokens(seed)
    expected = literal(OBJECTIVE, *[tensor.numpy() for tensor in tokens])
    assert float(loss_of(OBJECTIVE, tokens)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("column", [0, 3])
def test_gradient_equals_finite_differences(column: int) -> None:
    tokens = random_tokens(7, count=60)
    moved = tokens[column].clone().requires_grad_()
    loss = loss_of(OBJECTIVE, [*tokens[:column], moved, *tokens[column + 1 :]])
    (gradient,) = torch.autograd.grad(loss, moved)
    for index in range(len(moved)):
        sides = []
        for step in (1e-6, -1e-6):
            shifted = tokens[column].clone()
            shifted[index] += step
            arguments = [*tokens[:column], shifted, *tokens[column + 1 :]]
            sides.append(literal(OBJECTIVE, *[tensor.numpy() for tensor in arguments]))
        assert float(gradient[index]) == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-7)


def test_parts_of_a_batch_add_up() -> None:
    log_pi, log_old, advantage, entropy, log_reference = random_tokens(1)

    def part(here: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return grpo(
            OBJECTIVE,
            log_pi[here],
            log_old[here],
            advantage[here],
            entropy[here],
            len(log_pi),
            log_old[here],
            log_reference[here],
        )

    whole, metrics = part(slice(None))
    parts = [part(slice(0, 90)), part(slice(90, None))]
    assert float(whole) == pytest.approx(sum(float(loss) for loss, _ in parts))
    for name, value in metrics.items():
        assert float(value) == pytest.approx(sum(float(each[name]) for _, each in parts)), name


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [1.1, 3.9, 4.1, 50.0])
def test_delta_bites_only_where_the_advantage_is_negative(advantage: float, ratio: float) -> None:
    def gradient(delta: float) -> float:
        objective = Objective(delta=delta, kl_coefficient=0, entropy_coefficient=0)
        log_pi = torch.full((1,), ratio).log().requires_grad_()
        zero = torch.zeros(1)
        loss, _ = grpo(objective, log_pi, zero, zero + advantage, zero, 1, zero)
        return float(torch.autograd.grad(loss, log_pi)[0])

    bites = gradient(4.0) != gradient(1e6)
    assert bites == (advantage < 0 and ratio > 4)


@pytest.mark.parametrize("difference", [-30.0, -3.0, -0.1, 0.1, 3.0])
def test_kl_pulls_towards_the_reference(difference: float) -> None:
    """Unlike between two tensors without gradient, a defect of a published trainer."""
    log_reference, zero = torch.full((1,), -35.0), torch.zeros(1)
    log_pi = (log_reference - difference).requires_grad_()
    objective = Objective(kl_coefficient=0.5, entropy_coefficient=0)
    loss, metrics = grpo(objective, log_pi, log_pi.detach(), zero, zero, 1, zero, log_reference)
    (gradient,) = torch.autograd.grad(loss, log_pi)
    assert float(gradient) == pytest.approx(0.5 * (1 - np.exp(difference)), rel=1e-4)
    assert float(loss.detach()) == pytest.approx(0.5 * float(metrics["kl_reference"]))


@settings(deadline=None)  # shared cores
@given(*[st.floats(-(2.0**100), 0, width=32)] * 4, st.floats(-(2.0**20), 2.0**20, width=32))
def test_nothing_overflows_in_fp32(
    pi: float, old: float, generation: float, reference: float, advantage: float
) -> None:
    log_pi = torch.tensor([pi], requires_grad=True)
    log_old, given_advantage, log_generation, log_reference = (
        torch.tensor([value]) for value in (old, advantage, generation, reference)
    )
    loss, metrics = grpo(
        OBJECTIVE,
        log_pi,
        log_old,
        given_advantage,
        torch.ones(1),
        1,
        log_generation,
        log_reference,
    )
    (gradient,) = torch.autograd.grad(loss, log_pi)
    assert all(np.isfinite(float(value.detach())) for value in (loss, gradient, *metrics.values()))


log_ratio = st.floats(-1e4, 1e4)


@settings(deadline=None)  # shared cores
@given(log_ratio, st.floats(-100, 100), st.floats(0.01, 0.9), st.floats(0.01, 10))
def test_loss_of_a_token_is_bounded(r: float, a: float, epsilon: float, gap: float) -> None:
    objective = Objective(
        epsilon=epsilon, delta=1 + epsilon + gap, kl_coefficient=0, entropy_coefficient=0
    )
    check(objective)
    zero = torch.zeros(1, dtype=torch.float64)
    log_pi = torch.full((1,), r, dtype=torch.float64, requires_grad=True)
    loss, metrics = grpo(objective, log_pi, zero, torch.full_like(zero, a), zero, 1, zero)
    (gradient,) = torch.autograd.grad(loss, log_pi)
    bound = abs(a) * (1 + epsilon if a > 0 else objective.delta)
    assert abs(float(loss.detach())) <= bound * (1 + 1e-9)
    assert abs(float(gradient)) <= bound * (1 + 1e-9)
    assert all(np.isfinite(float(value)) for value in metrics.values())
    if (a > 0 and r > np.log1p(epsilon) + 1e-6) or (a < 0 and r < np.log1p(-epsilon) - 1e-6):
        assert float(gradient) == 0  # already moved far enough the right way
    if a < 0 and r > np.log(objective.delta) + 1e-6:
        assert float(gradient) == 0  # the second side: no unbounded push back either


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=16))
def test_advantages_are_centred_and_scaled(rewards: list[float]) -> None:
    tensor = torch.tensor(rewards, dtype=torch.float64)
    plain, scaled = advantages(tensor, False), advantages(tensor, True)
    assert plain.numpy() == pytest.approx(np.array(rewards) - np.mean(rewards))
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-6)
    assert scaled.numpy() == pytest.approx(expected)
    assert abs(float(scaled.sum())) < 1e-6


def test_advantages_of_several_groups_do_not_mix() -> None:
    rewards = torch.tensor([[0.0, 1.0], [5.0, 5.0]])
    assert advantages(rewards, False).tolist() == [[-0.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize(("epsilon", "delta"), [(0.2, 1.2), (0.2, 1.0), (0.0, 4.0), (1.0, 4.0)])
def test_contradicting_bounds_are_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(UserError, match=r"delta.*epsilon"):
        check(Objective(epsilon=epsilon, delta=delta))


def test_kl_without_reference_is_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="reference"):
        grpo(OBJECTIVE, one, one, one, one, 1, one)
