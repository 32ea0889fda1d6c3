from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from peers.learning.advantages import Completions, advantages
from peers.learning.formulas import FORMULAS, Tokens
from peers.learning.objective import Totals, describe, k3, loss
from peers.learning.settings import LearnerSettings
from swarm.errors import UserError
from swarm.wire.manifest import (
    ADVANTAGES,
    OBJECTIVES,
    OF_COMPLETIONS,
    Objective,
    ProcessRewards,
    Schedule,
)

OBJECTIVE = Objective(
    kl_coefficient=0.3, entropy_coefficient=0.2, epsilon_high=0.28, weight_max=1.5, band_high=2.0
)
NAMES = [name for name in OBJECTIVES if name != "synthesis"]
OPTIONS: dict[str, dict[str, Any]] = {
    "clip_cov": {"portion": 1.0, "bounds": [0.5, 5.0]},  # nothing is left to the draw
    "kl_cov": {"portion": 0.1, "beta": 0.7},
}


def named(name: str, **changes: Any) -> Objective:
    return replace(OBJECTIVE, name=name, options=OPTIONS.get(name, {}), **changes)


LENGTH_MAX = 17

# --- the formulas as they stand in the papers, completion by completion, token by token ----------


def bounded_ratio(above: float, below: float) -> float:
    return float(np.exp(np.clip(above - below, -20, 20)))


def ppo(g: Objective, r: float, a: float) -> float:
    clipped = min(max(r, 1 - g.epsilon), 1 + (g.epsilon_high or g.epsilon)) * a
    loss = min(r * a, clipped)
    return max(loss, g.delta * a) if a < 0 else loss  # the dual clip


def plain(g: Objective, pi: float, old: float, mu: float, a: float) -> float:
    return ppo(g, bounded_ratio(pi, old), a)


def masked(g: Objective, pi: float, old: float, mu: float, a: float) -> float:
    k = bounded_ratio(old, mu)
    return (k if g.band_low <= k <= g.band_high else 0.0) * ppo(g, bounded_ratio(pi, old), a)


def truncated(g: Objective, pi: float, old: float, mu: float, a: float) -> float:
    return min(bounded_ratio(old, mu), g.weight_max) * ppo(g, bounded_ratio(pi, old), a)


def decoupled(g: Objective, pi: float, old: float, mu: float, a: float) -> float:
    return bounded_ratio(old, mu) * ppo(g, bounded_ratio(pi, old), a)


def trust_region(g: Objective, pi: float, old: float, mu: float, a: float) -> float:
    moved = np.exp(pi) - np.exp(mu)
    kept = not (abs(moved) > g.change_max and moved * a > 0)
    ratio = bounded_ratio(pi, mu)
    return (min(ratio, g.delta) if a < 0 else ratio) * a if kept else 0.0


PER_TOKEN: dict[str, Callable[[Objective, float, float, float, float], float]] = {
    "grpo": plain,
    "dr_grpo": plain,
    "dapo": plain,
    "icepop": masked,
    "tis": truncated,
    "decoupled_ppo": decoupled,
    "dppo": trust_region,
}


AVERAGES = {"dr_grpo": "limit", "luspo": "sums"}
AVERAGES |= dict.fromkeys(["gspo", "gmpo", "sapo"], "completions")


def gains(g: Objective, columns: list[Any], frozen_pi: Any) -> list[float]:
    """What each token adds to the objective, in float64."""
    log_pi, log_old, log_mu, advantage, _, completion, log_teacher = columns
    w = g.teacher_weight
    advantage = (1 - w) * advantage + w * (log_teacher - frozen_pi)
    covariance = (frozen_pi - frozen_pi.mean()) * (advantage - advantage.mean())
    highest = np.argsort(covariance)[-max(1, int(0.1 * len(log_pi))) :]
    found = []
    for i in range(len(log_pi)):
        here = [place for place in range(len(log_pi)) if completion[place] == completion[i]]
        a, r = advantage[i], bounded_ratio(log_pi[i], log_old[i])
        if g.name in ("gspo", "luspo"):
            total = sum(np.clip(log_pi[j] - log_old[j], -20, 20) for j in here)
            gain = ppo(g, np.exp(total / len(here)), a)
        elif g.name == "gmpo":
            logs = [np.clip(log_pi[j] - log_old[j], -20, 20) for j in here]
            kept = [max(each, -g.epsilon) if a < 0 else min(each, g.epsilon_high) for each in logs]
            gain = np.prod(np.exp(kept)) ** (1 / len(here)) * a
            gain = max(gain, g.delta * a) if a < 0 else gain
        elif g.name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            gain = 4 / tau / (1 + np.exp(-tau * (r - 1))) * a
        elif g.name == "vespo":
            w = bounded_ratio(sum(frozen_pi[j] for j in here), sum(log_mu[j] for j in here))
            k, decay = (3.0, 2.0) if a < 0 else (2.0, 3.0)
            gain = w**k * np.exp(decay * (1 - w)) * a * log_pi[i]
        elif g.name == "cispo":
            gain = min(bounded_ratio(frozen_pi[i], log_old[i]), g.weight_max) * a * log_pi[i]
        elif g.name == "clip_cov":
            free = (r >= 1 - g.epsilon or a > 0) and (r <= 1 + g.epsilon_high or a < 0)
            free = free and not (r > g.delta and a < 0)
            gain = 0.0 if free and 0.5 < covariance[i] < 5 else ppo(g, r, a)
        elif g.name == "kl_cov":
            gain = max(r * a, g.delta * a) if a < 0 else r * a
            gain -= 0.7 * abs(np.log(r)) if i in highest else 0.0
        else:
            gain = PER_TOKEN[g.name](g, log_pi[i], log_old[i], log_mu[i], a)
        drift = sum(log_mu[j] - frozen_pi[j] for j in here) / len(here)
        found.append(0.0 if g.drift_max and drift > g.drift_max and a < 0 else gain)
    return found


def literal(g: Objective, columns: list[Any], frozen_pi: Any = None) -> float:
    """The loss in float64. `frozen_pi`: log π where a stop-gradient stands in the formula."""
    log_pi, _, log_mu, _, entropy, completion, log_reference = columns
    tokens, completions = len(log_pi), int(completion.max()) + 1
    average = AVERAGES.get(g.name, "tokens") if g.average == "published" else g.average
    total = 0.0
    for i, gain in enumerate(gains(g, columns, log_pi if frozen_pi is None else frozen_pi)):
        total -= (
            gain
            / {
                "tokens": tokens,
                "completions": completions * int((completion == completion[i]).sum()),
                "sums": completions,
                "limit": completions * LENGTH_MAX,
            }[average]
        )
    for i in range(tokens):
        d = min(log_reference[i] - log_pi[i], 20)
        kl = min(np.exp(d) - d - 1, 10)
        if g.kl_estimate == "k2":
            kl = max(d, -20) ** 2 / 2
        if g.kl_by_ratio:
            kl *= bounded_ratio(log_pi[i], log_mu[i])
        total += g.kl_coefficient * kl / tokens - g.entropy_coefficient * entropy[i] / tokens
        squared = np.clip(log_pi[i] - log_mu[i], -20, 20) ** 2
        total += g.sampler_kl_coefficient * squared / tokens
    return float(total)


def random_columns(
    seed: int, count: int = 300, spread: float = 1.5, extremes: bool = True
) -> list[torch.Tensor]:
    """log π, old, μ, A, entropy, completion, reference: far enough apart to reach every bound."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    log_pi = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    completion = torch.arange(count) // 7  # the last one is shorter
    advantage = normal()[completion]
    log_old = log_pi + normal() * spread
    log_mu = torch.minimum(log_old + normal(), torch.zeros(()))
    log_reference = log_pi + normal() * 5
    entropy = torch.rand(count, generator=generator, dtype=torch.float64)
    if extremes:
        log_old[0], log_old[8], log_mu[15] = log_pi[0] - 100, log_pi[8] + 100, -100
    return [log_pi, log_old, log_mu, advantage, entropy, completion, log_reference]


def tokens_of(columns: list[torch.Tensor]) -> Tokens:
    names = [field.name for field in dataclasses.fields(Tokens)]
    named: dict[str, Any] = dict(zip(names, columns, strict=False))
    completions = int(columns[5].max()) + 1 if len(columns[5]) else 0
    return Tokens(**named, completions=completions, log_teacher=columns[6])


def totals_of(columns: list[torch.Tensor]) -> Totals:
    return Totals(len(columns[0]), int(columns[5].max()) + 1, LENGTH_MAX)


def loss_of(objective: Objective, columns: list[torch.Tensor]) -> torch.Tensor:
    return loss(objective, tokens_of(columns), totals_of(columns))[0]


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(OF_COMPLETIONS)))
def test_a_teacher_is_mixed_into_every_tokens_advantage(name: str) -> None:
    columns = random_columns(5, count=60)
    objective = named(name, teacher_weight=0.3)
    expected = literal(objective, [tensor.numpy() for tensor in columns])
    value, metrics = loss(objective, tokens_of(columns), totals_of(columns))
    assert float(value) == pytest.approx(expected, rel=1e-10)
    assert float(metrics["kl_teacher"]) == pytest.approx(float((columns[0] - columns[6]).mean()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kl_by_ratio": True},
        {"kl_estimate": "k2", "sampler_kl_coefficient": 0.1, "drift_max": 0.4},
        *({"average": each} for each in ("tokens", "completions", "sums", "limit")),
    ],
)
def test_equals_the_literal_formulas(name: str, seed: int, changes: dict[str, Any]) -> None:
    columns = random_columns(seed, count=100)
    objective = named(name, **changes)
    expected = literal(objective, [tensor.numpy() for tensor in columns])
    assert float(loss_of(objective, columns)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("column", "kl_by_ratio"), [(0, False), (0, True), (4, False)])
def test_gradient_equals_finite_differences(name: str, column: int, kl_by_ratio: bool) -> None:
    """By log π and by the entropy; the reference differs from π, where the KL has a gradient."""
    columns = random_columns(7, count=21, spread=0.4, extremes=False)
    # A difference below −11 has a gradient on purpose though its value is clamped.
    columns[6] = columns[0] + (columns[6] - columns[0]).clamp(-9.9, 5)
    objective = named(name, kl_by_ratio=kl_by_ratio, drift_max=0.1)
    moved = columns[column].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        loss_of(objective, [*columns[:column], moved, *columns[column + 1 :]]), moved
    )
    assert bool((gradient != 0).any())
    for index in range(len(moved)):
        sides = []
        for step in (1e-6, -1e-6):
            shifted = columns[column].clone()
            shifted[index] += step
            arguments = [*columns[:column], shifted, *columns[column + 1 :]]
            sides.append(literal(objective, [t.numpy() for t in arguments], columns[0].numpy()))
        expected = (sides[0] - sides[1]) / 2e-6
        assert float(gradient[index]) == pytest.approx(expected, abs=1e-7, rel=1e-5), index


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(OPTIONS)))
def test_parts_of_a_batch_add_up(name: str) -> None:
    """All but those that compare the tokens of one forward pass."""
    columns = random_columns(1)
    objective = named(name)
    totals = totals_of(columns)

    def part(here: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return loss(objective, tokens_of([column[here] for column in columns]), totals)

    whole, metrics = part(slice(None))
    parts = [part(slice(0, 91)), part(slice(91, None))]  # 13 whole completions, and the rest
    assert float(whole) == pytest.approx(sum(float(value) for value, _ in parts))
    for key, value in metrics.items():
        assert float(value) == pytest.approx(sum(float(each[key]) for _, each in parts)), key


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_without_a_token_adds_nothing(name: str) -> None:
    none = [column[:0] for column in random_columns(1)]
    value, metrics = loss(named(name, drift_max=0.1), tokens_of(none), Totals(9, 3, 5))
    assert [float(each) for each in (value, *metrics.values())] == [0.0] * (1 + len(metrics))


def one_token(
    objective: Objective, log_pi: torch.Tensor, advantage: float, **changed: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A batch of one token whose old and μ are 0 unless given."""
    zero = torch.zeros_like(log_pi.detach())
    tokens = Tokens(
        log_pi=log_pi,
        log_old=zero,
        log_mu=zero,
        advantage=zero + advantage,
        entropy=zero,
        completion=torch.zeros(1, dtype=torch.int64),
        completions=1,
    )
    return loss(objective, dataclasses.replace(tokens, **changed), Totals(1, 1, 1))


UNBOUNDED = sorted(set(NAMES) - {"cispo", "sapo", "vespo", "kl_cov"})
"""Objectives that the ratio of a token with A < 0 would enter without a bound."""


@pytest.mark.parametrize("name", UNBOUNDED)
@pytest.mark.parametrize("ratio", [4.1, 50.0, 1e6])
def test_delta_bounds_the_negative_advantages_of_every_objective(name: str, ratio: float) -> None:
    """The dual clip: the loss is at most δ·|A|, and beyond δ the token has no gradient."""
    chosen = named(name, kl_coefficient=0, entropy_coefficient=0)
    # Under dppo a probability that rises by at most change_max is not left out.
    log_old = torch.full((1,), -20.0 if name == "dppo" else 0.0)
    log_pi = (log_old + np.log(ratio)).requires_grad_()
    value, metrics = one_token(chosen, log_pi, -2.0, log_old=log_old, log_mu=log_old)
    (gradient,) = torch.autograd.grad(value, log_pi)
    assert float(value.detach()) == pytest.approx(2 * chosen.delta, rel=1e-5)
    assert float(gradient) == 0
    assert float(metrics["clipped_delta"]) == 1


@pytest.mark.parametrize("name", list(AVERAGES))
def test_a_groups_weight_does_not_depend_on_how_many_others_are_kept(name: str) -> None:
    """Half the completions of a batch give half the gradient of all of them, twice over."""
    columns = random_columns(3, count=280, spread=0.1, extremes=False)
    chosen = named(name, kl_coefficient=0, entropy_coefficient=0)

    def gradient(kept: int) -> torch.Tensor:
        some = [column[: 7 * kept] for column in columns]
        some[0] = some[0].clone().requires_grad_()
        totals = Totals(tokens=7 * kept, completions=40, completion_tokens_max=LENGTH_MAX)
        value, _ = loss(chosen, tokens_of(some), totals)
        return torch.autograd.grad(value, some[0])[0]

    torch.testing.assert_close(gradient(40)[:70], gradient(10))


@pytest.mark.parametrize("difference", [-30.0, -3.0, -0.1, 0.1, 2.0, 3.0])
def test_kl_pulls_towards_the_reference(difference: float) -> None:
    """Unlike between two tensors without gradient, a defect of a published trainer.

    The value is clamped to 10. The gradient beyond it ends only where π is the smaller one.
    """
    log_reference = torch.full((1,), -35.0)
    log_pi = (log_reference - difference).requires_grad_()
    objective = Objective(kl_coefficient=0.5, entropy_coefficient=0)
    value, metrics = one_token(
        objective, log_pi, 0.0, log_old=log_pi.detach(), log_reference=log_reference
    )
    (gradient,) = torch.autograd.grad(value, log_pi)
    slope = 0.0 if difference > 2.6 else 1 - np.exp(difference)
    assert float(gradient) == pytest.approx(0.5 * slope, rel=1e-3)
    expected = min(10, np.exp(difference) - difference - 1)
    assert float(metrics["kl_reference"]) == pytest.approx(expected, rel=1e-4)
    assert float(value.detach()) == pytest.approx(0.5 * float(metrics["kl_reference"]))


def test_kl_by_ratio_is_unbiased_on_rollouts_of_another_policy() -> None:
    """Its gradient, averaged over μ's tokens, is that of KL(π ‖ reference); else it is not."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    parameters = logits[0].clone().requires_grad_()
    log_pi = torch.log_softmax(parameters, -1)
    log_mu, log_reference = torch.log_softmax(logits[1:], -1)
    exact = (log_pi.exp() * (log_pi - log_reference)).sum()
    (expected,) = torch.autograd.grad(exact, parameters, retain_graph=True)

    def averaged(kl_by_ratio: bool) -> torch.Tensor:
        objective = Objective(kl_coefficient=1, entropy_coefficient=0, kl_by_ratio=kl_by_ratio)
        total = torch.zeros((), dtype=torch.float64)
        for token in range(6):  # every token as often as μ draws it
            value, _ = one_token(
                objective,
                log_pi[token : token + 1],
                0.0,
                log_mu=log_mu[token : token + 1],
                log_reference=log_reference[token : token + 1],
            )
            total = total + log_mu[token].exp() * value
        return torch.autograd.grad(total, parameters, retain_graph=True)[0]

    torch.testing.assert_close(averaged(True), expected)
    assert float((averaged(False) - expected).abs().max()) > 0.01


def test_the_default_kl_gradient_is_that_of_the_reverse_divergence() -> None:
    """On tokens of π itself, k3's gradient averages to ∇KL(reference ‖ π), not to the other."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    parameters = logits[0].clone().requires_grad_()
    log_pi = torch.log_softmax(parameters, -1)
    log_reference = torch.log_softmax(logits[1], -1)
    averaged = (log_pi.exp().detach() * k3(log_reference, log_pi)).sum()
    reverse = (log_reference.exp() * (log_reference - log_pi)).sum()
    forward = (log_pi.exp() * (log_pi - log_reference)).sum()
    found, of_reverse, of_forward = (
        torch.autograd.grad(value, parameters, retain_graph=True)[0]
        for value in (averaged, reverse, forward)
    )
    torch.testing.assert_close(found, of_reverse)
    assert float((found - of_forward).abs().max()) > 0.01


any_log = st.floats(-(2.0**100), 0, width=32)


@settings(deadline=None)  # shared cores
@given(
    st.sampled_from(NAMES),
    st.tuples(any_log, any_log, any_log, any_log),
    st.floats(-(2.0**20), 2.0**20, width=32),
    st.booleans(),
)
def test_nothing_overflows_in_fp32(
    name: str, logs: tuple[float, float, float, float], advantage: float, kl_by_ratio: bool
) -> None:
    log_pi, log_old, log_mu, log_reference = (torch.tensor([value]) for value in logs)
    log_pi.requires_grad_()
    value, metrics = one_token(
        named(name, kl_by_ratio=kl_by_ratio, sampler_kl_coefficient=0.1, drift_max=0.1),
        log_pi,
        advantage,
        log_old=log_old,
        log_mu=log_mu,
        log_reference=log_reference,
    )
    (gradient,) = torch.autograd.grad(value, log_pi)
    assert all(np.isfinite(float(each.detach())) for each in (value, gradient, *metrics.values()))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"sapo", "vespo", "kl_cov"}))
def test_figures_count_what_an_objective_leaves_alone(name: str) -> None:
    """A token counted as clipped or masked has no gradient; one that is not has one."""
    columns = random_columns(4)
    columns[0].requires_grad_()
    objective = named(name, kl_coefficient=0, entropy_coefficient=0)
    value, metrics = loss(objective, tokens_of(columns), totals_of(columns))
    (gradient,) = torch.autograd.grad(value, columns[0])
    counted = sum(
        float(share) * len(gradient)
        for key, share in metrics.items()
        if key.startswith("clipped_") or key == "outside_band"
    )
    inert = int((gradient == 0).sum())
    if name == "icepop":  # a token may be both clipped and outside the band
        assert inert <= counted <= 2 * inert
    else:
        # Where |log ratio| is beyond 20 nothing moves either: two tokens here were made so.
        assert counted <= inert + 1e-4 <= counted + 3
    assert inert < len(gradient)
    assert (counted > 0) == (name != "cispo")


def test_effective_share() -> None:
    """1 on-policy; (Σw)² / (n Σw²) otherwise."""
    columns = random_columns(2, spread=0.3)
    _, metrics = loss(OBJECTIVE, tokens_of(columns), totals_of(columns))
    shown = describe({name: float(value) for name, value in metrics.items()})
    weights = np.exp(np.clip((columns[0] - columns[2]).numpy(), -20, 20))
    expected = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert shown["effective_share"] == pytest.approx(expected)
    ratio = np.exp(np.clip((columns[0] - columns[1]).numpy(), -20, 20))
    assert shown["ratio_std"] == pytest.approx(ratio.std(), rel=1e-6)
    columns[1] = columns[2] = columns[0]
    _, metrics = loss(OBJECTIVE, tokens_of(columns), totals_of(columns))
    shown = describe({name: float(value) for name, value in metrics.items()})
    assert shown["effective_share"] == pytest.approx(1)
    assert shown["ratio_std"] == pytest.approx(0, abs=1e-6)


@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k3_is_never_negative(left: float, right: float) -> None:
    values = torch.tensor([[left], [right]], dtype=torch.float64)
    assert float(k3(values[0], values[1])) >= 0


# --- advantages ----------------------------------------------------------------------------------


def literal_advantages(g: Objective, groups: list[list[float]], parts: Any) -> list[float]:
    """Group by group, in float64; `parts`: [parts][groups][G]."""

    def apart(rewards: list[float]) -> Any:
        values = np.array(rewards, np.float64)
        return (values - values.mean()) / (values.std(ddof=1) + 1e-6)

    found: list[float] = []
    for index, rewards in enumerate(groups):
        values = np.array(rewards, np.float64)
        centred = values - values.mean()
        if g.advantage == "group" and g.normalise_by_std:
            centred = apart(rewards)
        elif g.advantage == "rloo":
            others = [np.delete(values, i).mean() for i in range(len(values))]
            centred = values - np.array(others)
        elif g.advantage == "maxrl" and values.any():
            centred = centred / values.mean()
        elif g.advantage == "reinforce_pp":
            centred = values
        elif g.advantage == "gdpo":
            centred = apart(parts[0][index]) + 3 * apart(parts[1][index])
        found += centred.tolist()
    whole = np.array(found)
    if g.advantage in ("batch", "reinforce_pp", "gdpo"):
        whole = (whole - whole.mean()) / (whole.std(ddof=1) + 1e-6)
    return list(whole.tolist())


REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=6)


@settings(deadline=None)  # shared cores
@given(st.lists(REWARDS, min_size=1, max_size=4), st.sampled_from(ADVANTAGES), st.booleans())
def test_advantages_are_those_of_the_formulas(
    groups: list[list[float]], name: str, by_std: bool
) -> None:
    options: Any = {"weights": ["b=3.0"]} if name == "gdpo" else {}
    g = Objective(advantage=name, normalise_by_std=by_std, advantage_options=options)
    some = Completions.of(groups)
    parts = {"a": some.reward, "b": some.reward.flip(0)}
    cut = np.cumsum([len(group) for group in groups])[:-1]
    split = [[*map(list, np.split(parts[each].numpy(), cut))] for each in "ab"]
    found = advantages(g, dataclasses.replace(some, parts=parts))
    expected = literal_advantages(g, groups, split)
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(st.lists(st.tuples(REWARDS, st.integers(1, 9)), min_size=1, max_size=4))
def test_prompts_count_alike_in_a_mean_over_tokens(groups: list[tuple[list[float], int]]) -> None:
    """ScaleRL's mean: over a prompt's tokens, then over prompts; here of A·token, cut to 2 each."""
    rewards = [(of_group * 2)[:2] for of_group, _ in groups]
    lengths = [[step, 2 * step + 1] for _, step in groups]
    options: Any = {"mean": "prompts"}
    some = Completions.of(rewards, torch.tensor([each for pair in lengths for each in pair]))
    plain = literal_advantages(Objective(advantage="batch"), rewards, [])
    found = advantages(Objective(advantage="batch", advantage_options=options), some)
    shares = (found.double() * some.length).view(-1, 2)  # Σ over a completion's tokens
    literal = [
        (plain[2 * index] * a + plain[2 * index + 1] * b) / (a + b) / len(groups)
        for index, (a, b) in enumerate(lengths)
    ]
    over_tokens = shares.sum(1) / int(some.length.sum())
    assert over_tokens.tolist() == pytest.approx(literal, rel=1e-5, abs=1e-5)


def test_without_parts_there_is_one_and_a_missing_one_counts_as_nothing() -> None:
    g, rewards = Objective(advantage="gdpo"), [[0.0, 1.0], [1.0, 0.0]]
    plain = advantages(g, Completions.of(rewards))
    torch.testing.assert_close(plain, torch.tensor([-1.0, 1.0, 1.0, -1.0]) * 0.75**0.5)
    absent = torch.full((4,), torch.nan)
    some = dataclasses.replace(Completions.of(rewards), parts={"b": absent})
    assert advantages(g, some).tolist() == [0.0] * 4
    lone = Completions.of([[3.0]])
    for name in set(ADVANTAGES):
        assert advantages(Objective(advantage=name), lone).tolist() == [0.0]


@pytest.mark.parametrize(
    ("length", "lost"), [(5, 0), (6, 0), (7, 0.125), (8, 0.25), (10, 0.5), (99, 0.5)]
)
def test_the_last_tokens_before_the_limit_cost_more_and_more(length: int, lost: float) -> None:
    """Of a limit of 10, the last 4 tokens, up to 0.5."""
    g = Objective(advantage="rloo", overlong_tokens=4, overlong_penalty=0.5)
    some = Completions.of([[1.0, 0.0]], torch.tensor([length, 1]))
    assert advantages(g, some, 10).tolist() == pytest.approx([1 - lost, lost - 1])


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"delta": 1.2}, "objective.delta is 1.2; it must be greater than 1 \\+ epsilon = 1.2"),
        ({"epsilon_high": 3.5}, "greater than 1 \\+ epsilon = 4.5"),
        ({"name": "tis"}, "needs step_start"),
        ({"name": "icepop"}, "needs step_start"),
        ({"name": "decoupled_ppo"}, "needs step_start"),
        ({"kl_by_ratio": True, "kl_estimate": "k2"}, "k2 has the exact gradient"),
        ({"truncated": "leave_out", "process": ProcessRewards(weight=1.0)}, "need whole groups"),
        ({"name": "grop"}, "'grop', which is neither built in .* near it are grpo"),
        ({"advantage": "maxlr"}, "objective.advantage is 'maxlr', which .* maxrl"),
        ({"options": {"tau": [1, 2]}}, "has 'tau'; the objective 'grpo' takes: none"),
        ({"name": "sapo", "options": {"tau": [1, -2]}}, "tau is .1, -2.: Expected `float` > 0"),
        ({"name": "gspo", "teacher_weight": 0.5}, "no advantages of single tokens"),
        ({"name": "gspo", "process": ProcessRewards(weight=1.0)}, "no advantages of single tokens"),
    ],
)
def test_contradicting_numbers_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        LearnerSettings(replace(Objective(), **change), Schedule(steps=1, groups_per_step=1))


def test_missing_parts_are_refused() -> None:
    log_pi = torch.zeros(1)
    with pytest.raises(ValueError, match="reference"):
        one_token(OBJECTIVE, log_pi, 1.0)
    with pytest.raises(ValueError, match="no teacher"):
        one_token(Objective(teacher_weight=1.0), log_pi, 1.0)
    columns = random_columns(1)
    with pytest.raises(ValueError, match="length limit"):
        loss(Objective(name="dr_grpo"), tokens_of(columns), Totals(300, 43))


@pytest.mark.parametrize("beyond", ["truncate", "mask"])
@pytest.mark.parametrize("unit", ["token", "sequence", "mean"])
def test_the_weight_of_tis_is_a_tokens_or_its_completions(unit: str, beyond: str) -> None:
    columns = random_columns(3, 40, extremes=False)
    tokens = tokens_of(columns)
    plain, _ = FORMULAS["grpo"](OBJECTIVE, tokens)
    found, masks = FORMULAS["tis"](OBJECTIVE, tokens, unit=unit, beyond=beyond)
    _, log_old, log_mu, _, _, completion, _ = (each.numpy() for each in columns)
    for i in range(len(found)):
        logs = (log_old - log_mu)[completion == completion[i]]
        weight = {
            "token": np.exp(log_old[i] - log_mu[i]),
            "sequence": np.exp(logs.sum()),
            "mean": np.exp(logs.mean()),
        }[unit]
        far = weight > OBJECTIVE.weight_max
        kept = (0.0 if beyond == "mask" else OBJECTIVE.weight_max) if far else weight
        assert float(found[i]) == pytest.approx(kept * float(plain[i]), rel=1e-4, abs=1e-6)
        assert bool(masks["weights_clipped"][i]) == far
    assert masks["weights_clipped"].any() and not masks["weights_clipped"].all()
