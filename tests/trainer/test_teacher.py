"""On-policy distillation: a teacher's log-probabilities as the advantage of every token."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.groups import make_batch
from peers.engines.demo import make_policy
from peers.engines.loading import load
from peers.learning.learner import Learner
from swarm.errors import UserError
from tests.engines.families import SUPPORTED, save_random
from tests.trainer.test_adapters import adapted, learn
from tests.trainer.test_learner import log_probabilities, random_groups, settings, teach


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    folder = tmp_path / "teacher"
    make_policy(folder, seed=7)
    return folder


def test_the_policy_comes_nearer_to_its_teacher_and_not_without_one(
    base: Path, teacher: Path
) -> None:
    groups = random_groups(1, policy=0)
    batch = make_batch(groups[:-1])  # the last one has nothing to teach
    wanted = log_probabilities(load(teacher).float(), batch)

    def gaps(weight: float) -> list[float]:
        chosen = settings(teacher_weight=weight, warmup_steps=0, gradient_norm_max=1.0)
        learner = Learner(base, dataclasses.replace(chosen, teacher=str(teacher)))
        found = []
        for step in range(6):
            recent = [dataclasses.replace(each, policy=max(0, step - 1)) for each in groups]
            gap = log_probabilities(learner.model, batch) - wanted
            figures = teach(learner, recent, step)
            assert ("kl_teacher" in figures) == bool(weight)
            if weight:
                assert figures["kl_teacher"] == pytest.approx(float(gap.mean()), abs=1e-3)
            found.append(float(gap.square().mean()))
        return found

    taught, alone = gaps(1.0), gaps(0.0)
    assert taught[-1] < 0.7 * taught[0]
    assert alone[-1] > 0.9 * alone[0]
    assert gaps(0.5)[-1] < alone[-1]


def test_the_teacher_of_adapters_is_an_adapter(base: Path, teacher: Path, tmp_path: Path) -> None:
    expert = Learner(base, adapted())
    learn(expert, range(2))
    expert.export(tmp_path / "expert")
    chosen = dataclasses.replace(adapted(teacher_weight=1.0), teacher=str(tmp_path / "expert"))
    learner, groups = Learner(base, chosen), random_groups(0, policy=0)
    batch = make_batch(groups[:-1])
    gap = log_probabilities(learner.model, batch) - log_probabilities(expert.model, batch)
    figures = teach(learner, groups, 0)
    assert figures["kl_teacher"] == pytest.approx(float(gap.mean()), rel=0.05)
    assert abs(float(gap.mean())) > 1e-4
    with pytest.raises(UserError, match="is a whole model, but the run trains adapters"):
        Learner(base, dataclasses.replace(chosen, teacher=str(teacher)))


def test_a_teacher_that_cannot_judge_is_refused(base: Path, teacher: Path, tmp_path: Path) -> None:
    chosen = settings(teacher_weight=0.5)
    with pytest.raises(UserError, match=r"set teacher under .trainer. to the folder"):
        Learner(base, chosen)
    path = teacher / "tokenizer.json"
    read = json.loads(path.read_text())
    vocabulary = read["model"]["vocab"]
    one, other, *_ = vocabulary
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(read))
    named = dataclasses.replace(chosen, teacher=str(teacher))
    with pytest.raises(UserError, match="has another tokenizer than the run's model"):
        Learner(base, named)
    path.unlink()
    with pytest.raises(UserError, match="is no tokenizer file"):
        Learner(base, named)
    learner = Learner(base, settings())
    with pytest.raises(UserError, match="is no tokenizer file"):  # a later version of the run
        learner.follow(dataclasses.replace(chosen, teacher=str(tmp_path / "absent")))
    smaller = tmp_path / "smaller"
    save_random(SUPPORTED["llama"], smaller, seed=0)
    (smaller / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="holds another model than"):
        Learner(base, dataclasses.replace(chosen, teacher=str(smaller)))
