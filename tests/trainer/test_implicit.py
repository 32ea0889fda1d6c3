"""Implicit process rewards against direct formulas: φ's step, the rewards, their advantages."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.groups import Group, as_accepted
from peers.engines.loading import load as load_model
from peers.learning import packing
from peers.learning.advantages import Completions, advantages
from peers.learning.implicit import ProcessModel, process_advantages
from peers.learning.learner import Learner
from peers.learning.plan import Model, plan
from peers.learning.ranks import Ranks
from peers.learning.scoring import Part, ScoredBatch, assemble, completions_of, score
from peers.learning.settings import LearnerSettings
from peers.learning.sharding import whole
from swarm.jobs.training import Sharding
from swarm.rollouts.rollout import Rollout
from swarm.wire.manifest import Adapter, ProcessRewards
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import random_groups, same, settings, teach, weights_of
from tests.trainer.test_plan import ON_CPU, WORK, held, part

PROCESS = ProcessRewards(weight=0.7, beta=0.5, learning_rate=1e-2)


def chosen(**changes: Any) -> LearnerSettings:
    return settings(**{"process": PROCESS, "advantage": "rloo", **changes})


def assembled(learner: Learner, groups: Sequence[Group]) -> tuple[Part, ScoredBatch]:
    accepted = as_accepted(groups)
    score(accepted, learner.policy, learner.past, learner.settings, learner.step)
    parts = [(each, each.informative) for each in accepted]
    return parts, assemble(parts, learner.policy, learner.settings, current=learner.step)


def of_process(learner: Learner) -> ProcessModel:
    assert learner.process is not None
    return learner.process


def process_weights(learner: Learner) -> dict[str, torch.Tensor]:
    trained = of_process(learner).policy.trained().items()
    return {name: whole(value.detach()).clone() for name, value in trained}


def log_probabilities(model: Any, group: Group, row: int) -> torch.Tensor:
    """Those of a completion's tokens, by transformers' own forward pass."""
    tokens = torch.tensor([group.rollouts[row].tokens])
    count = len(group.rollouts[row].model_tokens)
    logits = model(tokens).logits[0, -count - 1 : -1]
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[0, -count:, None])[:, 0]
    return found


def naive(groups: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Equation 5 of the paper, γ = 1, written out: advantages of the tokens of all groups."""
    found = []
    for group in groups:
        for index, rewards in enumerate(group):
            others = [statistics.fmean(r) for j, r in enumerate(group) if j != index]
            for t in range(len(rewards)):
                found.append(sum(reward - statistics.fmean(others) for reward in rewards[t:]))
    return found


# --- advantages ----------------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=6), min_size=2, max_size=5),
        min_size=1,
        max_size=3,
    )
)
def test_advantages_of_process_rewards_are_those_of_the_formula(
    rewards: list[list[list[float]]],
) -> None:
    groups = [
        Group(
            [Rollout.single_turn([5, 6], [3] * len(row)) for row in rows],
            rewards=[float(index % 2) for index in range(len(rows))],
            policy=0,
        )
        for rows in rewards
    ]
    found = process_advantages(
        torch.tensor([reward for group in rewards for row in group for reward in row]),
        torch.tensor([len(row) for group in rewards for row in group]),
        completions_of([(each, each.informative) for each in as_accepted(groups)]),
        Ranks(),
    )
    torch.testing.assert_close(found, torch.tensor(naive(rewards)), atol=1e-4, rtol=1e-4)


# --- the second model ----------------------------------------------------------------------------


def test_a_step_of_the_second_model_follows_the_cross_entropy_of_outcomes(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One AdamW step along the gradient of the formula, in passes of its own, and rewards by the
    weights after it."""
    monkeypatch.setattr(packing, "PASS_TOKENS_MAX", 30)  # several passes
    learner = Learner(base, chosen())
    groups = random_groups(1, policy=0)
    parts, batch = assembled(learner, groups)
    assert len(batch.passes) > 2
    batches, figures = of_process(learner).judge([parts], [batch])

    model, reference = load_model(base).float(), load_model(base).float()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0)
    rows = [(group, row) for group in groups[:-1] for row in range(4)]

    def log_ratios() -> list[torch.Tensor]:
        return [
            log_probabilities(model, *row) - log_probabilities(reference, *row).detach()
            for row in rows
        ]

    right = torch.tensor([group.rewards[row] for group, row in rows])
    odds = torch.sigmoid(0.5 * torch.stack([each.sum() for each in log_ratios()]))
    loss = -(right * odds.log() + (1 - right) * (1 - odds).log()).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    assert figures["process_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert figures["process_gradient_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert float(norm) > 1e-2
    after = process_weights(learner)
    for name, value in model.named_parameters():
        # AdamW's first step is the gradient's sign; about zero, that is rounding in both.
        assert value.grad is not None
        clear = value.grad.abs() > 1e-6
        torch.testing.assert_close(after[name][clear], value.detach()[clear], atol=2e-5, rtol=1e-3)

    with torch.no_grad():
        rewards = [(0.5 * each).tolist() for each in log_ratios()]
    assert figures["process_reward"] == pytest.approx(statistics.fmean(map(sum, rewards)), abs=1e-3)
    assert max(abs(r) for row in rewards for r in row) > 1e-2
    outcome = torch.cat(
        [
            advantages(learner.settings.objective, Completions.of([g.rewards])).repeat_interleave(
                torch.tensor([len(rollout.model_tokens) for rollout in g.rollouts])
            )
            for g in groups[:-1]
        ]
    )
    process = torch.tensor(naive([rewards[at : at + 4] for at in range(0, len(rewards), 4)]))
    torch.testing.assert_close(batches[0].advantage, outcome + 0.7 * process, atol=2e-3, rtol=1e-3)


def test_it_learns_to_tell_right_from_wrong_and_the_base_stays(base: Path) -> None:
    learner = Learner(base, chosen(learning_rate=1e-9))
    groups = random_groups(3, policy=0)
    figures = [
        teach(learner, [dataclasses.replace(g, policy=max(0, s - 1)) for g in groups], s)
        for s in range(8)
    ]
    assert figures[0]["process_loss"] == pytest.approx(0.6931, abs=1e-3)  # it knows nothing
    assert figures[-1]["process_loss"] < 0.4 and figures[-1]["process_accuracy"] > 0.9
    assert all(step["process_skipped"] == 0 for step in figures)


def test_a_version_of_the_run_begins_it_and_changes_its_numbers(base: Path) -> None:
    learner = Learner(base, settings())
    teach(learner, random_groups(1, policy=0), 0)
    learner.follow(chosen())
    base_weights = dict(load_model(base).named_parameters())
    assert all(torch.equal(v, base_weights[n]) for n, v in process_weights(learner).items())
    teach(learner, random_groups(2, policy=0), 1)
    before = process_weights(learner)
    learner.follow(chosen(process=msgspec.structs.replace(PROCESS, learning_rate=1e-30)))
    teach(learner, random_groups(3, policy=1), 2)
    assert same(before, process_weights(learner))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_numbers_skip_the_steps_of_both_models(base: Path, value: float) -> None:
    learner = Learner(base, chosen())
    teach(learner, random_groups(1, policy=0), 0)
    parameter = next(iter(of_process(learner).policy.trained().values()))
    with torch.no_grad():
        parameter[5] = value
    before, broken = weights_of(learner), process_weights(learner)
    figures = teach(learner, random_groups(2, policy=0), 1)
    assert figures["process_skipped"] == figures["skipped"] == 1
    assert same(before, weights_of(learner))
    found = process_weights(learner)
    assert all(torch.equal(found[n], v) or v.isnan().any() for n, v in broken.items())


# --- layouts and states --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "adapter",
    [Adapter(), pytest.param(Adapter(rank=4, alpha=8.0), marks=pytest.mark.slow)],
    ids=["whole", "adapter"],
)
def test_a_resumed_learner_has_the_same_second_model_to_the_last_bit(
    base: Path, tmp_path: Path, adapter: Adapter
) -> None:
    """Also after a rollback, to a state from before the second model had taken a step."""
    goes_on = dataclasses.replace(chosen(optimiser_steps=2), adapter=adapter)
    through, resumed = Learner(base, goes_on), Learner(base, goes_on)
    through.export(tmp_path / "0")
    through.save(tmp_path / "state-0")
    figures = [teach(through, random_groups(s, policy=max(0, s - 1)), s) for s in range(2)]
    through.export(tmp_path / "policy-2")
    through.save(tmp_path / "state-2")
    figures.append(teach(through, random_groups(2, policy=2), 2))

    resumed.load(tmp_path / "state-2", {2: tmp_path / "policy-2"})
    assert teach(resumed, random_groups(2, policy=2), 2) == figures[2]
    assert same(process_weights(through), process_weights(resumed))
    resumed.load(tmp_path / "state-0", {})
    again = [teach(resumed, random_groups(s, policy=max(0, s - 1)), s) for s in range(2)]
    assert again == figures[:2]


@pytest.mark.slow
def test_two_ranks_reward_what_one_process_rewards(base: Path, tmp_path: Path) -> None:
    """Groups are divided over the ranks, so a baseline's completions are not all on one."""

    def learn(learner: Learner) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        metrics = [
            teach(learner, random_groups(s, max(0, s - 1), count=4 - s, size=3), s, [str(s)])
            for s in range(3)
        ]
        return metrics, process_weights(learner)

    expected, weights = learn(Learner(base, chosen(optimiser_steps=2)))

    def work(ranks: Ranks) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        return learn(Learner(base, chosen(optimiser_steps=2), ranks=ranks))

    for metrics, found in run_ranks(2, tmp_path, work):
        for one, other in zip(metrics, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-3)
        assert all(torch.allclose(found[name], weights[name], atol=1e-4) for name in weights)


def test_a_trainer_with_a_second_model_holds_what_was_planned(base: Path) -> None:
    learner = Learner(base, chosen())
    for step in range(4):
        teach(learner, random_groups(step, policy=max(0, step - 2)), step)
    work = dataclasses.replace(WORK, held=4, process=True)
    found = plan(Model(base), Sharding(), ON_CPU, work)
    policy = of_process(learner).policy
    state = policy.state()
    weights = sum(v.nbytes for n, v in state.items() if n.startswith("model."))
    assert part(found, "model of process rewards") == weights
    assert part(found, "its optimiser states") == sum(v.nbytes for v in state.values()) - weights
    names = ("weights, fp32", "gradients, fp32", "optimiser states", "past policies and reference")
    assert {name: part(found, name) for name in names} == {
        name: held(learner)[name] for name in names
    }
    assert all(parameter.grad is None for parameter in policy.trained().values())
    saved = sum(v.nbytes for n, v in learner._state().items() if n != "generator")
    assert part(found, "copy of the training state") == saved
