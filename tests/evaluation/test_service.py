"""The child of `swarm eval`: tasks, samples, and checkpoints that cannot be evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from peers.engines.demo import make_policy
from peers.environments import Environment, NotGradable, TaskList, Tasks, task_of
from peers.environments.sort_digits import SortDigits
from peers.evaluation.service import EvaluationService
from peers.evaluation.tasks import different_tasks
from swarm.errors import UserError
from swarm.jobs.evaluation import DrawTasks, EvaluationSetup, NextSamples, PlayTasks, Sample
from swarm.wire.manifest import EnvironmentReference, Sampling

SORTING = EnvironmentReference(name="sort-digits", version="1")
CALCULATOR = EnvironmentReference(name="calculator", version="1", options={"digits": 1})
DRAW = DrawTasks(split="held_out", seed=0, tasks=3, max_new_tokens=8, stop_ids=[])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_policy(folder, seed=1)
    return folder


def service_of(folder: Path, *environments: EnvironmentReference) -> EvaluationService:
    return EvaluationService(EvaluationSetup(folder=str(folder), environments=list(environments)))


def play(service: EvaluationService, **job: Any) -> list[Sample]:
    sampling = Sampling(max_new_tokens=8, stop_ids=[2], group_size=2)

    async def gather() -> list[Sample]:
        wanted = PlayTasks(**{"environment": 0, "sampling": sampling, **job})
        await service.play(wanted)
        found: list[Sample] = []
        while samples := await service.finished(NextSamples()):
            found += samples
        return found

    return sorted(trio.run(gather), key=lambda sample: sample.row)


def test_a_sample_is_the_same_in_any_company(checkpoint: Path) -> None:
    service = service_of(checkpoint, SORTING, CALCULATOR)
    drawn = trio.run(service.draw, DRAW)
    assert drawn.tasks == [3, 3] and drawn.stop_ids == [2] and drawn.max_new_tokens == 8
    together = play(service, rows=list(range(6)))
    assert [sample.row for sample in together] == list(range(6))
    assert play(service, rows=[4]) == together[4:5]
    prompts = [sample.turns[0] for sample in together]
    assert prompts[::2] == prompts[1::2] and len(set(prompts)) == 3
    assert all(prompt.startswith("<bos>") for prompt in prompts)
    assert len({tuple(sample.turns) for sample in together[:2]}) == 2
    greedy = play(service, rows=[0, 1], greedy=True)
    assert greedy[0].turns == greedy[1].turns
    assert [sample.environment for sample in play(service, environment=1, rows=[0])] == [1]


def test_no_length_limit_means_what_the_context_leaves(checkpoint: Path) -> None:
    """The demo's model has 64 positions; its prompts have 8 tokens."""
    service = service_of(checkpoint, SORTING)
    assert trio.run(service.draw, DrawTasks(**{**_fields(DRAW), "max_new_tokens": 0})) == (
        trio.run(service.draw, DrawTasks(**{**_fields(DRAW), "max_new_tokens": 56}))
    )
    with pytest.raises(UserError, match=r"8 tokens; 7 are the most .* --max-new-tokens"):
        trio.run(service.draw, DrawTasks(**{**_fields(DRAW), "max_new_tokens": 57}))


def test_an_environment_with_few_tasks_gives_each_once() -> None:
    given = [task_of(SortDigits(), bytes([number]), "held_out") for number in range(5)]

    class Few(SortDigits):
        def tasks(self) -> Tasks:
            return TaskList(given)

    def prompts(environment: Environment, seed: int, count: int) -> list[Any]:
        drawn = different_tasks(environment, "held_out", seed, count)
        return [task.prompt for _, task in drawn]

    found = prompts(Few(), 0, 100)
    assert len(found) == len(set(found)) == 5
    assert prompts(Few(), 0, 3) == found[:3]
    assert prompts(SortDigits(), 0, 5) != prompts(SortDigits(), 1, 5)


def test_what_cannot_be_evaluated_is_a_sentence(checkpoint: Path, tmp_path: Path) -> None:
    chess = EnvironmentReference(name="chess", version="1")
    with pytest.raises(UserError, match="environment 'chess' is not installed here"):
        service_of(checkpoint, chess)
    with pytest.raises(UserError, match=r"tokenizer .*tokenizer\.json cannot be read"):
        service_of(tmp_path, SORTING)
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    with pytest.raises(UserError, match="holds no safetensors weights"):
        trio.run(service_of(tmp_path, SORTING).draw, DRAW)


def test_an_environment_that_raises_is_named(checkpoint: Path) -> None:
    class Broken(SortDigits):
        def grade(self, *_: Any) -> float:
            return 1 / 0

    class Away(SortDigits):
        def grade(self, *_: Any) -> float:
            raise NotGradable("its service is away")

    service = service_of(checkpoint, SORTING)
    service._environments = [Broken()]
    trio.run(service.draw, DRAW)
    with pytest.raises(UserError, match=r"'sort-digits' cannot grade .*ZeroDivisionError"):
        play(service, rows=[0])
    service._environments = [Away()]
    (sample,) = play(service, rows=[0])
    assert sample.problem.endswith("its service is away") and sample.reward == 0
    service._environments = [SortDigits()]
    assert play(service, rows=[0])  # the engine is free again


def _fields(job: DrawTasks) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__struct_fields__}
