from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.studies import LOSSES, STUDIES, Bases, Variant, learn
from peers.demo.recipes import recipe_of


def test_every_recipe_of_the_study_can_be_trained() -> None:
    names = set()
    for label, variant in STUDIES["recipes"].items():
        settings = variant.settings(0, 2, recipe_of(variant.task), half=False)
        assert settings.objective.problem(settings.schedule) is None
        assert settings.schedule.asynchrony == variant.staleness in (1, 4, 8)
        names.add(label.partition(": ")[2])
    assert names == set(LOSSES) and {"defaults", "intellect-2", "prime-rl", "trl"} < names


@pytest.mark.slow
def test_staler_rollouts_weigh_less_evenly(tmp_path: Path) -> None:
    bases = Bases(tmp_path)
    shares = []
    for staleness in (0, 6):
        curve = learn(bases, 0, Variant(staleness=staleness), 14)
        shares.append(min(curve.effective_share))
    assert shares[0] == pytest.approx(1)
    assert shares[1] < 0.9
