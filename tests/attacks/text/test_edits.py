"""Edits below the thresholds: a token is replaced by the right (or a wrong) one wherever the seed's
token is less than some margin ahead, to raise or lower rewards.

Caught by the evidence (*sampler*): within 1,000 tokens at a margin of 0.5 upwards, 2,000 downwards.
*Harmless* at 0.05: fewer than 1 % of tokens change, and rewards by less than 4 points.

Cost: the swarm recomputes them; the cheat's identity, and its unconsumed credit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attacks.drawing import Drawing, Draws, Rule, within
from tests.attacks.models import Arena


def upwards(margin: float) -> Rule:
    def rule(drawing: Drawing) -> Tensor:
        edited = within(drawing, torch.tensor(drawing.answers()), margin)
        return torch.where(drawing.is_right(), edited, drawing.honest().argmax(-1))

    return rule


def downwards(margin: float) -> Rule:
    def rule(drawing: Drawing) -> Tensor:
        best = drawing.honest().topk(2, -1)
        near = best.values[:, 0] - best.values[:, 1] < margin
        right = best.indices[:, 0] == torch.tensor(drawing.answers())
        return torch.where(
            near & right & drawing.is_right(), best.indices[:, 1], best.indices[:, 0]
        )

    return rule


@pytest.mark.parametrize("rule, tokens", [(upwards(0.5), 1000), (downwards(0.5), 2000)])
def test_edits_are_caught(arena: Arena, rule: Rule, tokens: int) -> None:
    arena.evicts(Draws(arena.engine, rule), tokens, "sampler", submissions=14)


@pytest.mark.parametrize("rule", [upwards(0.05), downwards(0.05)])
def test_small_edits_change_little(arena: Arena, rule: Rule) -> None:
    met = arena.meets(Draws(arena.engine, rule), range(8))
    changed = sum(judged.evidence.mismatches for judged in arena.recomputed(met))
    assert changed < 0.01 * met.tokens
    assert abs(met.reward - arena.meets_honestly(range(8)).reward) < 0.04
