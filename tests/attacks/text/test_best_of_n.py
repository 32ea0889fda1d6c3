"""Best of n: several samples with other noise, of which the best are handed in; or a group's
samples in an order that suits the cheat.

Caught by `sampling`: no sample has the noise of its row. Evicted within
1,500 tokens, or 8,000 where the policy leaves little choice (a temperature of 0.15).

Cost: the swarm recomputes them; the cheat generates n times as much, for nothing.
"""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.attacks.cheats import BestOf
from tests.attacks.drawing import Drawing, Draws
from tests.attacks.models import Arena


@pytest.mark.parametrize("tries", [2, 4])
def test_other_noise_is_caught(arena: Arena, tries: int) -> None:
    met = arena.evicts(BestOf(arena.engine, tries), 1500)
    assert met.refused > 0


def test_samples_in_another_order_are_caught(arena: Arena) -> None:
    def exchanged(drawing: Drawing) -> Tensor:
        logits = drawing.logits_of(arena.engine)
        return (logits + drawing.noise([row ^ 1 for row in drawing.rows])).argmax(-1)

    met = arena.evicts(Draws(arena.engine, exchanged), 300)
    assert met.accepted == 0 and met.failed["sampling"] == 1


def test_low_temperatures_leave_less_choice_and_are_caught_later(arena: Arena) -> None:
    arena.evicts(BestOf(arena.engine, 2), 8000, submissions=36, temperature=0.15)
