"""Router replay: a mixture trains with the experts that the generating policy chose."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.engines.demo import make_policy
from peers.engines.loading import load
from peers.learning import packing
from peers.learning.batch import AcceptedGroups, Batch
from peers.learning.groups import Group, as_accepted
from peers.learning.learner import Learner
from peers.learning.packing import Rows, lay_out, lay_out_flat
from peers.learning.ranks import Ranks
from peers.learning.scoring import assemble, score
from peers.learning.settings import LearnerSettings
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from tests.engines.families import SUPPORTED, save_random
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import random_groups, settings, teach
from tests.trainer.test_scored_families import gradients
from tests.trainer.test_sharded import Weights, close, everything

REPLAY = settings(router_replay=True, learning_rate=0.05, warmup_steps=0)


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen3-moe-window"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    make_policy(folder, seed=3)  # its tokenizer
    config = copy.deepcopy(SUPPORTED[request.param])
    config.vocab_size = 64
    save_random(config, folder, seed=2, scale=0.2)
    return folder


def scored(learner: Learner, groups: Sequence[Group], step: int) -> AcceptedGroups:
    (given,) = as_accepted(groups)
    score([given], learner.policy, learner.past, learner.settings, step)
    assert given.experts is not None
    return given


def log_probabilities(learner: Learner, passes: list[Rows], experts: Sequence[Any]) -> Tensor:
    scorer = learner.policy.scorer
    found = torch.zeros(sum(len(rows.index) for rows in passes))
    for rows, chosen in zip(passes, experts, strict=True):
        with scorer.routing.replaying(chosen, torch.device("cpu")):
            found = found.index_put((rows.index,), scorer(rows)[0])
    return found


def test_with_the_same_weights_replay_changes_nothing(mixture: Path) -> None:
    learner = Learner(mixture, REPLAY)
    given = scored(learner, random_groups(1, policy=0), step=9)
    batch = assemble([(given, given.informative)], learner.policy, REPLAY)
    replayed = log_probabilities(learner, batch.passes, batch.experts)
    chosen = log_probabilities(learner, batch.passes, [None] * len(batch.passes))
    assert given.log_mu is not None
    torch.testing.assert_close(replayed, chosen, atol=2e-6, rtol=0)
    torch.testing.assert_close(replayed, given.log_mu, atol=2e-6, rtol=0)


def test_after_a_step_it_trains_with_the_recorded_experts(mixture: Path) -> None:
    """The weights have moved so far that some routers would choose others."""
    learner = Learner(mixture, REPLAY)
    for step in range(2):
        teach(learner, random_groups(step, policy=step), step)
    given = scored(learner, random_groups(5, policy=0), step=2)
    batch = assemble([(given, given.informative)], learner.policy, REPLAY)
    used: list[Tensor] = []
    for layer in learner.model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(lambda _, call: used.append(call[1]))
    for replays in (True, False):
        same = []
        for rows, experts in zip(batch.passes, batch.experts, strict=True):
            used.clear()
            with learner.policy.scorer.routing.replaying(
                experts if replays else None, torch.device("cpu")
            ):
                learner.policy.scorer(rows)
            real = rows.input >= 0
            assert given.experts is not None
            expected = given.experts[rows.input[real]]
            same.append(torch.equal(torch.stack(used, dim=1)[real], expected.long()))
        assert all(same) == replays


class Literal(torch.nn.Module):
    """A mixture's layer with given experts, token by token."""

    def __init__(self, block: Any, normalise: bool) -> None:
        super().__init__()
        self.block, self.normalise = block, normalise
        self.given = torch.empty(0)
        """Experts of each token, [tokens, k]."""

    def forward(self, states: Tensor) -> Tensor:
        rows = []
        for state, experts in zip(states[0], self.given.tolist(), strict=True):
            weights = torch.softmax(self.block.gate.weight @ state, -1)[experts]
            if self.normalise:
                weights = weights / weights.sum()
            total = torch.zeros_like(state)
            for weight, expert in zip(weights, experts, strict=True):
                gate, up = (self.block.experts.gate_up_proj[expert] @ state).chunk(2)
                total = total + weight * (
                    self.block.experts.down_proj[expert] @ (F.silu(gate) * up)
                )
            rows.append(total)
        return torch.stack(rows)[None]


def literally(model: Any, batch: Batch, experts: Tensor) -> Tensor:
    """Log-probabilities of each sequence alone, with the literal layers."""
    mixtures = [layer for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    blocks = [layer.mlp for layer in mixtures]
    literal = [Literal(each, each.gate.norm_topk_prob) for each in blocks]
    found = []
    for layer, each in zip(mixtures, literal, strict=True):
        layer.mlp = each
    columns = zip(
        batch.split(batch.tokens), batch.split(batch.sampled), batch.split(experts), strict=True
    )
    for tokens, mask, chosen in columns:
        for index, each in enumerate(literal):
            each.given = chosen[:-1, index]
        logits = model(tokens[None, :-1]).logits[0]
        log_pi = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
        found.append(log_pi[mask[1:]])
    for layer, block in zip(mixtures, blocks, strict=True):
        layer.mlp = block
    return torch.cat(found)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_literal_layers(mixture: Path, checkpointing: bool) -> None:
    """Packed, padded and flat, with random experts, and where layers are computed again."""
    sharding = Sharding(activation_checkpointing=checkpointing)
    learner = Learner(mixture, dataclasses.replace(REPLAY, sharding=sharding))
    given = scored(learner, random_groups(3, policy=0, count=3, size=3), step=9)
    batch = given.batch(given.informative, REPLAY.objective)
    assert given.experts is not None
    shape = given.experts.shape
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(*shape[:2], 4, generator=generator).argsort(-1)
    experts = order[..., : shape[2]].to(torch.int16)
    model, plain = learner.model, load(mixture).float().eval()
    expected = literally(plain, batch, experts)
    expected_gradients = gradients(plain, expected)
    for lay in (
        lambda: lay_out(batch, "padded", merge=False),
        lambda: lay_out(batch, "packed", merge=False),
        lambda: lay_out_flat(batch, 20, merge=False),
    ):
        passes = lay()
        padded = torch.cat([experts, torch.full((1, *shape[1:]), -1, dtype=torch.int16)])
        total = torch.zeros(batch.token_count())
        model.zero_grad()
        weight = torch.linspace(-1, 1, batch.token_count())
        for rows in passes:
            routing = learner.policy.scorer.routing
            with routing.replaying(padded[rows.input], torch.device("cpu")):
                log_pi = learner.policy.scorer(rows)[0]
                (log_pi * weight[rows.index]).sum().backward()  # type: ignore[no-untyped-call]
            total[rows.index] = log_pi.detach()
        torch.testing.assert_close(total, expected.detach(), atol=1e-5, rtol=0)
        for name, parameter in model.named_parameters():
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found, expected_gradients[name], atol=2e-5, rtol=1e-4)


def test_models_without_experts_are_refused(base: Path) -> None:
    with pytest.raises(UserError, match=r"router_replay is true, but the model is no mixture"):
        Learner(base, REPLAY)
    learner = Learner(base, settings())
    with pytest.raises(UserError, match=r"router_replay is true, but the model is no mixture"):
        learner.follow(REPLAY)


@pytest.mark.slow
@pytest.mark.parametrize("old", ["generation", "step_start"])
def test_two_ranks_replay_what_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixture: Path, old: str
) -> None:
    monkeypatch.setattr(packing, "PASS_TOKENS_MAX", 30)
    chosen: LearnerSettings = dataclasses.replace(
        settings(router_replay=True, kl_coefficient=0.01, optimiser_steps=2),
        schedule=msgspec.structs.replace(REPLAY.schedule, old=old),
    )

    def learn(learner: Learner) -> list[dict[str, float]]:
        return [
            teach(learner, random_groups(step, policy=max(0, step - 1), count=4, size=3), step)
            for step in range(3)
        ]

    alone = Learner(mixture, chosen)
    expected = learn(alone)

    def work(ranks: Ranks) -> tuple[list[dict[str, float]], Weights, Weights]:
        learner = Learner(mixture, chosen, ranks=ranks)
        return learn(learner), *everything(learner)

    weights, gradients_ = everything(alone)
    for metrics, found, found_gradients in run_ranks(2, tmp_path, work):
        for one, other in zip(metrics, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-3)
        assert close(found, weights, 5e-5)
        assert close(found_gradients, gradients_, 2e-5)
