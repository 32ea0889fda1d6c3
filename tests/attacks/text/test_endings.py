"""Endings: the stop token drawn early or never, tokens after it, or an end before the limit.

Caught by `sampling` where a stop token is forced or withheld, since stop tokens are drawn like all
others (evicted with the first submission); by `ending`, a proven fault, where tokens follow the
stop token or the text ends without one before the limit.

Cost: the swarm recomputes at most one submission; the cheat's identity.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attacks.drawing import Drawing, Draws
from tests.attacks.models import Arena


def early(drawing: Drawing) -> Tensor:
    stop = torch.full((len(drawing.rows),), drawing.sampling.stop_ids[0])
    return stop if drawing.position == 5 else drawing.honest().argmax(-1)


def late(drawing: Drawing) -> Tensor:
    perturbed = drawing.honest()
    perturbed[:, drawing.sampling.stop_ids] = -torch.inf
    return perturbed.argmax(-1)


@pytest.mark.parametrize("rule", [early, late])
def test_forced_and_withheld_stops_are_caught(arena: Arena, rule: object) -> None:
    met = arena.evicts(Draws(arena.engine, rule), 300)  # type: ignore[arg-type]
    assert met.accepted == 0 and met.failed["sampling"] == 1


@pytest.mark.parametrize("tail", [[5], [2], [5, 2]])
def test_tokens_after_the_stop_are_a_proven_fault(arena: Arena, tail: list[int]) -> None:
    order = arena.order(0)
    ended = [*range(4, 6), order.sampling.stop_ids[0], *tail]
    arena.proves_fault("ending", arena.with_completion(order, 3, ended), order)


def test_an_end_before_the_limit_is_a_proven_fault(arena: Arena) -> None:
    order = arena.order(0)
    arena.proves_fault("ending", arena.with_completion(order, 3, [4, 5, 6]), order)
