"""Another temperature than the run's: 0.9, 1.1, or nearly 0.

Caught by `sampling` or the evidence (*sampler*): evicted within 2,000 tokens. Greedy decoding is
refused at once.

Cost: the swarm recomputes them; the cheat's identity. Until the eviction a temperature of 0.9 adds
3 points of reward to what it hands in.
"""

from __future__ import annotations

import pytest

from tests.attacks.cheats import Generates
from tests.attacks.drawing import Draws
from tests.attacks.models import Arena


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_another_temperature_is_caught(arena: Arena, factor: float) -> None:
    arena.evicts(Generates(arena.engine, temperature_factor=factor), 2000)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_a_slightly_different_temperature_is_caught(arena: Arena, factor: float) -> None:
    cheat = Generates(arena.engine, temperature_factor=factor)
    arena.evicts(cheat, 10_000, "sampler", submissions=60)


def test_greedy_decoding_is_refused_at_once(arena: Arena) -> None:
    cheat = Draws(arena.engine, lambda drawing: drawing.logits_of(arena.engine).argmax(-1))
    met = arena.evicts(cheat, 300)
    assert met.accepted == 0 and met.failed["sampling"] == 1
