"""Top-p sampling: only the likeliest tokens up to 99 or 95 % are drawn from.

Caught by `sampling_bound` or `sampling`; evicted within 4,000 tokens at 0.99, and
within 700 at 0.95.

Cost: the swarm recomputes them; the cheat's identity.
"""

from __future__ import annotations

import pytest

from tests.attacks.cheats import Generates, Nucleus
from tests.attacks.models import FP32, Arena


@pytest.mark.parametrize("top_p, tokens", [(0.99, 4000), (0.95, 700)])
def test_a_nucleus_is_caught(arena: Arena, top_p: float, tokens: int) -> None:
    engine = FP32.engine(arena.stage.policy, Nucleus)
    assert isinstance(engine, Nucleus)
    engine.top_p = top_p
    arena.evicts(Generates(engine), tokens, submissions=18)
