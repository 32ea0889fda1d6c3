from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.distillation import WAYS, accuracy
from benchmarks.distillation import learn as learn_by
from benchmarks.studies import LOSSES, STUDIES, Bases, Variant, learn
from peers.demo.recipes import recipe_of
from peers.demo.warmup import prepare_base
from peers.environments import load as load_environment


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


@pytest.mark.slow
def test_each_way_learns_from_about_as_many_tokens(tmp_path: Path) -> None:
    """And writes the policies that are measured; here the teacher is another weak policy."""
    environment = load_environment("sort-digits", "1")
    for name, seed in (("0", 0), ("teacher", 1)):
        prepare_base(tmp_path / name, seed)
    before, tokens = accuracy(tmp_path / "0", environment), {}
    assert 0.1 < before < 0.3
    for label in ("on-policy", "fine-tuning", "on-policy and rewards"):
        folder = tmp_path / label
        shutil.copytree(tmp_path / "0", folder / "0")
        tokens[label] = learn_by(WAYS[label], folder, tmp_path / "teacher", environment, 0, 2)
        assert accuracy(folder / "2", environment) != before
    assert max(tokens.values()) < 1.1 * min(tokens.values())
