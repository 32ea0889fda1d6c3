"""Families that only transformers knows: scored, trained, sharded, adapted, published, read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from peers.engines.demo import save_tokenizer
from peers.engines.general import GeneralEngine
from peers.engines.loading import load
from peers.engines.model import weight_files
from peers.learning.groups import make_batch
from peers.learning.learner import Learner
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from swarm.wire.manifest import Adapter
from tests.engines.test_general import FAMILIES, MORE, policy_of
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import random_groups, settings, teach
from tests.trainer.test_scored_families import BATCH, gradients, row_by_row
from tests.trainer.test_sharded import close, everything, learn

PADDED = frozenset({"bloom", "falcon_h1", "gpt_oss", "nemotron_h", "qwen3_next"})
"""Families whose packed rows would see each other, most by a recurrent layer."""


def base_of(family: str, folder: Path, **changes: Any) -> Path:
    policy_of(family, folder, **changes)
    save_tokenizer(folder)
    return folder


def chosen(**changes: Any) -> LearnerSettings:
    fields = {name: changes.pop(name) for name in ("adapter", "sharding") if name in changes}
    return dataclasses.replace(settings(optimiser_steps=2, kl_coefficient=0.01), **fields)


def stored_names(folder: Path) -> set[str]:
    return {name for path in weight_files(folder) for name in safetensors.torch.load_file(path)}


def learns_what_engines_see(family: str, tmp_path: Path) -> None:
    base = base_of(family, tmp_path / "base")
    learner = Learner(base, chosen())
    assert learner.policy.scorer.packs == (family not in PADDED)
    # As scored by transformers, each sequence alone.
    model = load(base, torch.float32).eval()
    expected = row_by_row(model, BATCH)
    passes = learner.policy.passes(BATCH)
    torch.testing.assert_close(learner.policy.score(passes), expected, atol=1e-5, rtol=1e-5)
    wanted = gradients(model, expected)
    scored = torch.zeros(BATCH.token_count())
    for rows in passes:
        scored = scored.index_put((rows.index,), learner.policy.scorer(rows)[0])
    for name, gradient in gradients(learner.model, scored).items():
        largest = max(1.0, float(wanted[name].abs().max()))
        torch.testing.assert_close(gradient, wanted[name], atol=3e-5 * largest, rtol=0, msg=name)
    learner.model.zero_grad()

    teach(learner, random_groups(0, policy=0), 0, ["0"])
    learner.export(tmp_path / "policy")
    assert stored_names(tmp_path / "policy") == stored_names(base)
    groups = random_groups(5, policy=1)
    rollout = groups[0].rollouts[0]
    count = len(rollout.model_tokens)
    batch = make_batch(groups, learner.settings.objective)
    found = learner.policy.score(learner.policy.passes(batch))[:count]
    engine = GeneralEngine(tmp_path / "policy")
    indices = range(len(rollout.tokens) - count, len(rollout.tokens))
    states = engine.prefill([rollout.tokens], [indices]).states[0]
    log_all = torch.log_softmax(engine.logits(states), -1)
    log_pi = log_all[range(count), torch.tensor(rollout.model_tokens)]
    torch.testing.assert_close(log_pi, found, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_learns_what_engines_see(family: str, tmp_path: Path) -> None:
    learns_what_engines_see(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE)
def test_more_families_learn_what_engines_see(family: str, tmp_path: Path) -> None:
    learns_what_engines_see(family, tmp_path)


@pytest.mark.parametrize(
    "family", ["qwen3_next", *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES)]
)
def test_two_ranks_learn_what_one_learns(family: str, tmp_path: Path) -> None:
    base = base_of(family, tmp_path / "base")
    alone = Learner(base, chosen())
    learn(alone, range(2))
    expected, _ = everything(alone)

    def work(ranks: Ranks) -> dict[str, torch.Tensor]:
        learner = Learner(
            base, chosen(sharding=Sharding(activation_checkpointing=True)), ranks=ranks
        )
        learn(learner, range(2))
        learner.export(tmp_path / "policy")
        return everything(learner)[0]

    for weights in run_ranks(2, tmp_path, work):
        assert close(weights, expected, 5e-5)
    assert stored_names(tmp_path / "policy") == stored_names(base)
    loaded = {name: each.detach() for name, each in load(tmp_path / "policy").named_parameters()}
    assert close(loaded, expected, 5e-5)


def test_adapters_are_merged_by_the_engine(tmp_path: Path) -> None:
    base = base_of("gpt_oss", tmp_path / "base")
    adapter = Adapter(rank=4, alpha=8.0, targets=["q_proj", "o_proj"])
    learner = Learner(base, chosen(adapter=adapter))
    teach(learner, random_groups(0, policy=0), 0, ["0"])
    learner.export(tmp_path / "policy")
    assert not (tmp_path / "policy" / "model.safetensors").exists()
    config = tmp_path / "policy" / "adapter_config.json"
    config.write_text(config.read_text().replace('"base"', f'"{base}"'))
    groups = random_groups(5, policy=1)
    rollout = groups[0].rollouts[0]
    count = len(rollout.model_tokens)
    passes = learner.policy.passes(make_batch(groups, learner.settings.objective))
    found = learner.policy.score(passes)[:count]
    engine = GeneralEngine(tmp_path / "policy")
    indices = range(len(rollout.tokens) - count, len(rollout.tokens))
    states = engine.prefill([rollout.tokens], [indices]).states[0]
    log_all = torch.log_softmax(engine.logits(states), -1)
    log_pi = log_all[range(count), torch.tensor(rollout.model_tokens)]
    torch.testing.assert_close(log_pi, found, rtol=0, atol=2e-5)
    with pytest.raises(UserError, match=r"adapter.targets names gate_proj, which no layer"):
        Learner(base, chosen(adapter=Adapter(rank=4)))
