from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from benchmarks.groups import Group, as_accepted, make_batch
from peers.engines.loading import load as load_model
from peers.engines.model import read_weights
from peers.engines.native import NativeEngine
from peers.learning import packing
from peers.learning.batch import Batch
from peers.learning.learner import Learner
from peers.learning.packing import lay_out
from peers.learning.scorer import Scorer
from peers.learning.scoring import assemble, score
from peers.learning.settings import LearnerSettings
from peers.learning.step import GrpoStep
from swarm.errors import UserError
from swarm.rollouts.rollout import Rollout
from swarm.wire.manifest import Objective, Optimiser, Schedule
from tests.trainer.waits import Waits

SETTINGS = LearnerSettings(
    objective=Objective(kl_coefficient=0, entropy_coefficient=0),
    optimiser=Optimiser(learning_rate=1e-3, warmup_steps=3, final_learning_rate_share=0.1),
    schedule=Schedule(steps=8, groups_per_step=4, asynchrony=2, max_staleness=2),
)


def settings(**changes: Any) -> LearnerSettings:
    """`SETTINGS` with other fields of the optimiser and of the objective."""
    of_optimiser = set(changes) & set(Optimiser.__struct_fields__)
    replace = msgspec.structs.replace
    return dataclasses.replace(
        SETTINGS,
        optimiser=replace(SETTINGS.optimiser, **{name: changes.pop(name) for name in of_optimiser}),
        objective=replace(SETTINGS.objective, **changes),
    )


def random_groups(seed: int, policy: int, count: int = 4, size: int = 4) -> list[Group]:
    """Groups of uneven lengths with random rewards; the last one has nothing to teach."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, shape: int = 1) -> list[int]:
        return torch.randint(low, high, (shape,), generator=generator).tolist()

    groups = []
    for index in range(count):
        lengths = draw(1, 8, size)
        rewards = [float(reward) for reward in draw(0, 2, size)]
        rewards[:2] = [0.0, 1.0]
        prompt = draw(4, 14, draw(2, 7)[0])
        groups.append(
            Group(
                [Rollout.single_turn(prompt, draw(2, 14, length)) for length in lengths],
                rewards=[1.0] * size if index == count - 1 else rewards,
                policy=policy,
            )
        )
    return groups


def teach(
    learner: Learner, groups: Sequence[Group], step: int, names: Sequence[str] = ("",)
) -> dict[str, float]:
    """Take a rollout step on groups in memory."""
    return learner.train_step(as_accepted(groups, names[0], learner.policy.ranks), step)


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in learner.model.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(left[n], right[n], atol=2e-5) for n in left)


# --- batch -----------------------------------------------------------------------------------


@hypothesis_settings(deadline=None)  # shared cores
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(2, 5))
def test_batch_holds_every_token_once(seed: int, count: int, size: int) -> None:
    groups = random_groups(seed, policy=1, count=count, size=size)
    batch = make_batch(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rows = [rollout.tokens for rollout in rollouts]
    lengths = [len(rollout.model_tokens) for rollout in rollouts]
    assert [sequence.tolist() for sequence in batch.split(batch.tokens)] == rows
    masks = [mask.nonzero()[:, 0].tolist() for mask in batch.split(batch.sampled)]
    assert masks == [rollout.sampled for rollout in rollouts]
    assert batch.completion_lengths.tolist() == lengths
    assert batch.token_count() == sum(lengths)
    assert batch.lengths.tolist() == list(map(len, rows))
    owner = [row for row, length in enumerate(lengths) for _ in range(length)]
    assert batch.per_token(torch.arange(len(batch))).tolist() == owner


def test_only_groups_with_different_rewards_are_informative() -> None:
    groups = random_groups(0, policy=0)
    groups[1] = dataclasses.replace(groups[1], kept=False)
    (found,) = as_accepted(groups)
    assert found.informative == [0, 2]
    lengths = [len(rollout.tokens) for index in (0, 2) for rollout in groups[index].rollouts]
    assert found.lengths.tolist() == lengths
    assert (found.tokens_in([0, 2]), found.tokens_in([])) == (int(found.sampled.sum()), 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards": [1.0]}, "1 rewards for 4"),
        ({"rewards": [1.0, 0.0, float("nan"), 0.0]}, "not finite"),
        ({"rollouts": [], "rewards": []}, "0 rollouts"),
    ],
)
def test_malformed_groups_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(random_groups(0, policy=0)[0], **change)


def log_probabilities(model: Any, batch: Batch) -> torch.Tensor:
    """fp32 [n]."""
    values = torch.empty(batch.token_count())
    for rows in lay_out(batch):
        values[rows.index] = Scorer(model)(rows)[0].detach()
    return values


# --- learning --------------------------------------------------------------------------------


def test_the_ratio_is_taken_against_the_policy_that_generated(base: Path) -> None:
    """On-policy the ratio is exactly 1; two steps stale it is not, and both are one step's work."""
    learner = Learner(base, SETTINGS)
    first = teach(learner, random_groups(1, policy=0), 0)
    assert first["ratio"] == pytest.approx(1, abs=1e-6)
    assert first["kl_generation"] == pytest.approx(0, abs=1e-9)
    teach(learner, random_groups(2, policy=0), 1)
    stale = teach(learner, random_groups(1, policy=0), 2)
    assert stale["kl_generation"] > 1e-5
    assert stale["age"] == 2
    step_start = dataclasses.replace(
        SETTINGS, schedule=msgspec.structs.replace(SETTINGS.schedule, old="step_start")
    )
    other = Learner(base, step_start)
    teach(other, random_groups(1, policy=0), 0)
    late = teach(other, random_groups(2, policy=0), 1)
    assert late["ratio"] == pytest.approx(1, abs=1e-6)
    assert late["kl_generation"] > 1e-6


def test_mixed_policies_in_one_batch_each_get_their_own_log_mu(base: Path) -> None:
    learner = Learner(base, SETTINGS)
    teach(learner, random_groups(1, policy=0), 0)
    groups = [*random_groups(2, policy=0), *random_groups(3, policy=1)]

    def log_mu(groups: list[Group]) -> list[torch.Tensor]:
        given = as_accepted(groups)
        score(given, learner.policy, learner.past, SETTINGS, step=9)
        return [each.log_mu for each in given if each.log_mu is not None]

    first, second = log_mu(groups)
    assert torch.equal(first, log_mu(random_groups(2, policy=0))[0])
    assert torch.equal(second, log_mu(random_groups(3, policy=1))[0])


def test_learning_raises_the_probability_of_rewarded_completions(base: Path) -> None:
    groups = random_groups(5, policy=0, count=2)[:1]
    learner = Learner(base, settings(warmup_steps=0))
    batch = make_batch(groups)
    before = log_probabilities(learner.model, batch)
    teach(learner, groups, 0)
    after = log_probabilities(learner.model, batch)
    good = batch.per_token(torch.tensor(groups[0].rewards)) > 0
    assert float((after - before)[good].mean()) > 0 > float((after - before)[~good].mean())


def test_micro_batches_change_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for tokens_max in (1 << 14, 40):
        monkeypatch.setattr(packing, "PASS_TOKENS_MAX", tokens_max)
        learner = Learner(base, settings(kl_coefficient=0.1, entropy_coefficient=0.01))
        metrics = [teach(learner, random_groups(step, policy=0), step) for step in range(2)]
        results.append((weights_of(learner), metrics))
    (whole, whole_metrics), (parts, parts_metrics) = results
    assert close(whole, parts)
    for left, right in zip(whole_metrics, parts_metrics, strict=True):
        assert left == pytest.approx(right, abs=1e-4)


def test_several_optimiser_steps_cut_the_groups(base: Path) -> None:
    learner = Learner(base, settings(optimiser_steps=3))
    metrics = teach(learner, random_groups(1, policy=0, count=6), 0)
    assert metrics["kl_generation"] > 0  # the later parts are no longer on-policy


def test_nothing_to_learn_from_still_counts_as_a_step(base: Path) -> None:
    learner = Learner(base, SETTINGS)
    before = weights_of(learner)
    metrics = teach(learner, random_groups(1, policy=0)[-1:], 0, ["a"])
    assert same(before, weights_of(learner))
    assert metrics["groups_zero_advantage"] == 1
    assert (learner.step, learner.consumed) == (1, {0: ["a"]})


def test_a_non_finite_step_is_skipped_and_counted(base: Path) -> None:
    learner = Learner(base, settings(normalise_by_std=False))
    before = weights_of(learner)
    groups = [dataclasses.replace(random_groups(1, policy=0)[0], rewards=[3e38, -3e38, 0.0, 1.0])]
    metrics = teach(learner, groups, 0)
    assert metrics["skipped"] == 1
    assert same(before, weights_of(learner))
    assert teach(learner, random_groups(2, policy=0), 1)["skipped"] == 0
    assert all(bool(value.isfinite().all()) for value in weights_of(learner).values())


def reporting(groups: list[Group], values: list[list[float]]) -> list[Group]:
    """The same groups with log-probabilities, those of each rollout in turn."""
    left = iter(values)
    return [
        dataclasses.replace(
            group,
            rollouts=[
                Rollout.single_turn(each.prompt, each.model_tokens, log_probabilities=next(left))
                for each in group.rollouts
            ],
        )
        for group in groups
    ]


def test_engine_log_probabilities_are_compared_and_nothing_else(base: Path) -> None:
    """A worker that reports nonsense changes a figure, not the weights."""
    groups = random_groups(1, policy=0)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    engine = NativeEngine(base)
    states = engine.prefill(
        [rollout.tokens for rollout in rollouts], [rollout.sampled for rollout in rollouts]
    ).states
    true = [
        torch.log_softmax(engine.logits(each), -1)[
            range(len(each)), list(rollout.model_tokens)
        ].tolist()
        for rollout, each in zip(rollouts, states, strict=True)
    ]
    honest = reporting(groups, true)
    lying = reporting(groups, [[-9.0] * len(values) for values in true])
    results = []
    for given_groups in (groups, honest, lying):
        learner = Learner(base, SETTINGS)
        metrics = teach(learner, given_groups, 0)
        results.append((weights_of(learner), metrics.get("engine_log_probability_difference")))
    assert results[0][1] is None
    assert results[1][1] is not None and results[1][1] < 1e-5
    assert results[2][1] is not None and results[2][1] > 1
    assert same(results[0][0], results[1][0]) and same(results[0][0], results[2][0])


def test_wrong_turn_wrong_age_and_unknown_policy_are_refused(base: Path) -> None:
    learner = Learner(base, SETTINGS)
    with pytest.raises(ValueError, match="step 1 was asked for, but the learner is at step 0"):
        teach(learner, random_groups(1, policy=0), 1)
    with pytest.raises(ValueError, match="age -1"):
        teach(learner, random_groups(1, policy=1), 0)
    for step in range(3):
        teach(learner, random_groups(1, policy=0), step)
    with pytest.raises(ValueError, match="age 3"):
        teach(learner, random_groups(1, policy=0), 3)
    assert learner.policies == [0, 1, 2, 3]
    teach(learner, random_groups(1, policy=3), 3)
    assert learner.policies == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_passes_do_not_wait_for_the_device(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In a GPU's layout, twice as many passes read no more values from the device."""
    counts = []
    chosen = dataclasses.replace(settings(name=name, kl_coefficient=0.1), flat=True)
    for tokens_max in (60, 30):
        monkeypatch.setattr(packing, "PASS_TOKENS_MAX", tokens_max)
        learner = Learner(base, chosen)
        given = as_accepted(random_groups(1, policy=0))
        step = GrpoStep(learner.policy, learner.past, learner.settings, 0)
        score(given, learner.policy, learner.past, learner.settings, 0)
        parts = [(each, each.informative) for each in given]
        batch = assemble(parts, learner.policy, learner.settings, current=0)
        with Waits() as waits:
            step._optimise(batch, 0)
        counts.append((len(batch.passes), sorted(waits.found)))
        with Waits() as waits:
            learner.policy.score(batch.passes)
        assert waits.found == []
    (few, once), (many, again) = counts
    assert many > few
    assert once == again
    assert once.count("aten._local_scalar_dense") < 40  # AdamW's own, not one for each metric


# --- checkpoints -----------------------------------------------------------------------------


def run_steps(learner: Learner, steps: Sequence[int]) -> list[dict[str, float]]:
    return [
        teach(
            learner,
            random_groups(10 + step, policy=max(0, step - 2), count=5),
            step,
            [f"submission-{step}"],
        )
        for step in steps
    ]


@pytest.mark.parametrize("optimiser_steps", [1, 3])
def test_a_resumed_run_is_bitwise_the_same(
    base: Path, tmp_path: Path, optimiser_steps: int
) -> None:
    chosen = settings(
        optimiser_steps=optimiser_steps, kl_coefficient=0.01, entropy_coefficient=0.001
    )
    through = Learner(base, chosen)
    expected = run_steps(through, range(5))

    first = Learner(base, chosen)
    first.lineage = 4
    folders: dict[int, Path] = {}
    for step in range(3):
        folders[step] = tmp_path / f"policy-{step}"
        first.export(folders[step])
        run_steps(first, [step])
    first.save(tmp_path / "state")
    torch.manual_seed(99)
    second = Learner(base, chosen)
    second.load(tmp_path / "state", folders)
    assert second.policies == [0, 1, 2, 3]
    assert (second.lineage, second.step) == (4, 3)
    assert second.consumed == {1: ["submission-1"], 2: ["submission-2"]}
    assert run_steps(second, range(3, 5)) == expected[3:]
    assert same(weights_of(through), weights_of(second))
    names = {path.suffix for path in (tmp_path / "state").iterdir()}
    assert names == {".safetensors", ".json"}


def test_policies_that_are_gone_are_refused_after_resume(base: Path, tmp_path: Path) -> None:
    learner = Learner(base, SETTINGS)
    run_steps(learner, [0, 1])
    learner.save(tmp_path / "state")
    resumed = Learner(base, SETTINGS)
    resumed.load(tmp_path / "state", {})
    with pytest.raises(ValueError, match="policy 0 is not held"):
        run_steps(resumed, [2])


def test_export_is_what_engines_and_transformers_load(base: Path, tmp_path: Path) -> None:
    learner = Learner(base, SETTINGS)
    run_steps(learner, [0])
    learner.export(tmp_path / "policy")
    loaded = load_model(tmp_path / "policy")
    assert same(weights_of(learner), {n: p.detach() for n, p in loaded.named_parameters()})
    assert (tmp_path / "policy" / "tokenizer.json").read_bytes() == (
        base / "tokenizer.json"
    ).read_bytes()
    NativeEngine(base).load_weights(tmp_path / "policy", 1)


def test_bf16_policies_are_published_and_recomputed_as_bf16(base: Path, tmp_path: Path) -> None:
    """Peers generate with the rounded weights, so log μ is taken with the rounded weights too."""
    load_model(base).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    shutil.copyfile(base / "tokenizer.json", tmp_path / "base" / "tokenizer.json")
    learner = Learner(tmp_path / "base", SETTINGS)
    teach(learner, random_groups(1, policy=0), 0)
    learner.export(tmp_path / "policy")
    published = read_weights(tmp_path / "policy")
    assert {value.dtype for value in published.values()} == {torch.bfloat16}
    assert same(dict(learner.past.held[1]), published)
    assert {value.dtype for value in weights_of(learner).values()} == {torch.float32}
    assert load_model(tmp_path / "policy").dtype == torch.bfloat16


def test_step_start_is_the_learner_itself_not_the_rounded_policy(
    base: Path, tmp_path: Path
) -> None:
    load_model(base).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    step_start = msgspec.structs.replace(SETTINGS.schedule, old="step_start")
    learner = Learner(tmp_path / "base", dataclasses.replace(SETTINGS, schedule=step_start))
    first, second = run_steps(learner, [0, 1])
    assert first["kl_generation"] == pytest.approx(0, abs=1e-9)
    assert second["kl_generation"] > 1e-7
    assert second["ratio"] == pytest.approx(1, abs=1e-6)


def test_states_that_do_not_fit_are_refused(base: Path, tmp_path: Path) -> None:
    learner = Learner(base, SETTINGS)
    with pytest.raises(UserError, match="cannot be read"):
        learner.load(tmp_path / "nothing", {})
    learner.save(tmp_path / "state")
    path = tmp_path / "state" / "state.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 7'))
    with pytest.raises(UserError, match="version 7"):
        learner.load(tmp_path / "state", {})


# --- another version of the run --------------------------------------------------------------


def test_following_other_numbers_is_resuming_with_them(base: Path, tmp_path: Path) -> None:
    """Rate, betas, decay, objective, and a KL term against the base that there was none of."""
    other = dataclasses.replace(
        settings(
            name="dr_grpo", learning_rate=3e-3, beta1=0.5, weight_decay=0.1, kl_coefficient=0.05,
            optimiser_steps=2,
        ),
        schedule=Schedule(steps=20, groups_per_step=4, asynchrony=2, max_staleness=1),
        completion_tokens_max=9,
    )  # fmt: skip
    going_on = Learner(base, SETTINGS)
    teach(going_on, random_groups(0, policy=0), 0)
    going_on.save(tmp_path / "state")
    going_on.follow(other)

    resumed = Learner(base, other)
    resumed.load(tmp_path / "state", {0: base})
    for step in (1, 2):
        groups = random_groups(step, policy=step)
        found = [teach(learner, groups, step) for learner in (going_on, resumed)]
        assert found[0] == found[1]
        assert "kl_reference" in found[0] and found[0]["learning_rate"] > 2e-3
    assert same(weights_of(going_on), weights_of(resumed))
    assert going_on.policies == resumed.policies


def test_numbers_that_contradict_each_other_are_not_followed(base: Path) -> None:
    learner = Learner(base, SETTINGS)
    with pytest.raises(UserError, match="step_start"):
        learner.follow(dataclasses.replace(SETTINGS, objective=Objective(name="icepop")))
    assert learner.settings == SETTINGS
