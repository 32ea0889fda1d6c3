"""Rollouts generated before the seed was known, or answers written by somebody else.

Caught by `sampling` in the first submission that is recomputed, also where the policy leaves little
choice (a temperature of 0.15); evicted (*text*) within 300 tokens.

Cost: the swarm recomputes one submission; the cheat prefills it, and loses its identity.
"""

from __future__ import annotations

import pytest

from peers.calibration.work import HandedIn
from swarm.jobs import SubmissionOrder
from swarm.wire.manifest import Sampling
from tests.attacks.cheats import Generates, Work, proven
from tests.attacks.models import Arena


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.15])
def test_other_seeds_rollouts_are_caught(arena: Arena, temperature: float) -> None:
    cheat = Generates(arena.engine, attempt=1)
    met = arena.evicts(cheat, 300, temperature=temperature)
    assert met.accepted == 0 and met.failed["sampling"] == 1


def test_right_answers_are_caught(arena: Arena) -> None:
    def answers(work: Work, sampling: Sampling, _: SubmissionOrder) -> HandedIn:
        texts = [[*sorted(prompt[1:7]), sampling.stop_ids[0]] for prompt in work.prompts]
        return proven(arena.engine, work, texts)

    met = arena.evicts(answers, 300)
    assert met.reward == 1.0 and met.accepted == 0
