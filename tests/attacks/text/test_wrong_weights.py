"""Weights that are not the policy's: noise of 2 to 20 % on every weight, or another checkpoint.

Caught by `proofs` or `activations` in the first submission that is recomputed; evicted (*policy*
or *sampler*) within 3 submissions.

Cost: the swarm recomputes them; the cheat generates them for nothing, and loses its identity.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.engines import demo
from peers.engines.service import EngineService
from swarm.jobs.inference import InferenceSetup
from tests.attacks import weights
from tests.attacks.cheats import Generates
from tests.attacks.models import FP32, Arena
from tests.validator.conftest import generate, load


@pytest.mark.parametrize("size", [0.02, 0.05, 0.2])
def test_noise_on_the_weights_is_caught(arena: Arena, size: float) -> None:
    cheat = Generates(arena.changed(weights.noisy(size), f"noise-{size}"))
    met = arena.evicts(cheat, 700, "policy", "sampler")
    assert met.accepted == 0


def test_the_demos_cheat_is_refused(arena: Arena) -> None:
    order = arena.order(0)
    cheat = EngineService(InferenceSetup(alter_weights=0.02, environments=order.environments))
    load(cheat, arena.stage.policy)
    path = arena.stage.folder / "cheated"
    generate(cheat, path, order)
    judged = arena.judge(order, *arena.read(path))[1]
    assert judged is not None and judged.failed in ("proofs", "activations")
    assert not judged.proven_fault, "another machine might round so"


def test_another_checkpoint_is_caught(arena: Arena, tmp_path: Path) -> None:
    demo.make_policy(tmp_path, seed=2)
    met = arena.evicts(Generates(FP32.engine(tmp_path)), 300)
    assert met.accepted == 0 and met.failed["proofs"] == 1
