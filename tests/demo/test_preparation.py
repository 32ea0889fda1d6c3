"""The preparation of the base policy of a model that is given."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from peers.demo.recipes import Prepare, Warmup, recipe_of
from peers.demo.warmup import Preparation, warm_up
from peers.engines.device import find_dtype
from peers.engines.loading import load
from peers.engines.model import read_weights
from peers.environments.collection import Environments
from peers.evaluation.run import accuracies
from swarm.jobs.evaluation import Answer
from swarm.world.compute import LocalCompute
from tests.demo.chat_model import make_chat_model

WARMUP = Warmup(learning_rate=1e-2, warmup_steps=2, batch=8, steps_max=4)


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """A job for a small model with a warm-up of four steps."""
    model = make_chat_model(tmp_path / "model")
    recipe = recipe_of("sort-digits", model=model)
    recipe = msgspec.structs.replace(recipe, warmup=WARMUP)
    return Prepare(recipe=recipe, folder=str(tmp_path / "base"), model=str(model))


async def test_a_model_is_warmed_up_by_adapters_that_become_part_of_it(prepare: Prepare) -> None:
    before = read_weights(Path(prepare.model))
    assert await Preparation().warm_up(prepare) == WARMUP.steps_max
    after = read_weights(Path(prepare.folder))
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 2 * 7  # every target of two layers
    assert load(Path(prepare.folder)).dtype == load(Path(prepare.model)).dtype


async def test_a_warm_up_makes_the_answers_likelier(prepare: Prepare, tmp_path: Path) -> None:
    environments = Environments(prepare.recipe.environments)
    environment = environments.of(prepare.recipe.environments[0])
    easy = msgspec.structs.replace(WARMUP, steps_max=60, accuracy=1e-5)
    assert warm_up(tmp_path / "model", [environment], 0, easy, temperature=0.7) < easy.steps_max


@pytest.mark.wall_clock
async def test_it_is_measured_with_answers_to_show(prepare: Prepare) -> None:
    recipe, model = prepare.recipe, Path(prepare.model)
    found = await accuracies(LocalCompute(), model, recipe.environments, recipe.sampling, 8)
    assert found.sampled == found.greedy == 0.0
    assert len(found.answers) == 4
    assert all(isinstance(each, Answer) and each.question.endswith(">") for each in found.answers)


async def test_thresholds_are_measured_as_peers_here_compute(prepare: Prepare) -> None:
    thresholds = await Preparation().calibrate(
        msgspec.structs.replace(prepare, folder=prepare.model)
    )
    dtype = str(find_dtype("fastest", torch.device("cpu"))).removeprefix("torch.")
    assert not thresholds.observes and thresholds.measured_dtypes == [dtype]
