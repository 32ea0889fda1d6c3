from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import msgspec
import pytest
import safetensors.numpy
import torch
import trio
from blake3 import blake3

from peers.demo.recipes import ENVIRONMENT, SAMPLING, Warmup
from peers.demo.warmup import warm_up
from peers.engines.batch import generate, requests_for
from peers.engines.demo import BOS_ID
from peers.engines.episodes import play
from peers.engines.model import read_weights
from peers.engines.native import NativeEngine
from peers.environments import Renderer, Task, Tasks, split_of, task_of
from peers.environments import load as load_environment
from peers.environments.episodes import grade_segments
from peers.environments.interface import Split, as_text
from peers.environments.sort_digits import SortDigits
from peers.learning.attention import ATTENTIONS
from peers.learning.ranks import Ranks
from peers.learning.training_settings import Attention
from peers.trainer.service import TrainerService
from swarm.errors import UserError
from swarm.jobs.training import (
    AcceptedSubmission,
    BeginSave,
    Export,
    FinishSave,
    Follow,
    Resume,
    Resumed,
    ScoreAhead,
    StartTraining,
    Trained,
    TrainingTerms,
    TrainStep,
)
from swarm.wire.manifest import Objective, Optimiser, Sampling, Schedule
from tests.rollouts.harness import single_turns
from tests.trainer.ranks_harness import run_ranks

REWARDS = [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0]]


def start(base: Path, **changes: Any) -> StartTraining:
    job = StartTraining(
        model=str(base),
        terms=TrainingTerms(
            objective=Objective(kl_coefficient=0, entropy_coefficient=0),
            optimiser=Optimiser(learning_rate=1e-3),
            schedule=Schedule(steps=4, groups_per_step=2),
            sampling=SAMPLING,
        ),
        seed=0,
    )
    return msgspec.structs.replace(job, **changes)


def started(base: Path) -> TrainerService:
    service = TrainerService()
    trio.run(service.start, start(base))
    return service


def train(service: TrainerService, step: int, *submissions: AcceptedSubmission) -> Trained:
    return trio.run(service.train, TrainStep(step=step, submissions=list(submissions)))


def submission(
    base: Path,
    path: Path,
    policy: int,
    sampling: Sampling = SAMPLING,
    temperatures: Sequence[float] = (SAMPLING.temperature,) * 2,
    prompts: Sequence[list[int]] = ([BOS_ID, 4, 5, 14], [BOS_ID, 6, 14]),
) -> AcceptedSubmission:
    """2 groups × 3 of an environment each, sampled by the engine, in the form that a validator
    serves."""
    rows = [prompt for prompt in prompts for _ in range(3)]
    requests = [
        dataclasses.replace(each, temperature=temperatures[each.row // 3])
        for each in requests_for(
            rows, range(6), (policy, 1), 1.0, sampling.stop_ids, sampling.max_new_tokens
        )
    ]
    made = generate(NativeEngine(base), requests)
    rollouts = single_turns(
        group=[0, 0, 0, 1, 1, 1],
        sample=[0, 1, 2, 0, 1, 2],
        environment=[0, 0, 0, 1, 1, 1],
        policy=policy,
        stop_ids=sampling.stop_ids,
        prompts=rows,
        completions=[piece.tokens for piece in made],
        log_probabilities=[piece.log_probabilities.tolist() for piece in made],
        proofs=[bytes(258)] * 6,
    )
    raw = rollouts.to_bytes()
    path.write_bytes(raw)
    return AcceptedSubmission(
        digest=blake3(b"the worker's file of " + raw).digest(),
        path=str(path),
        rollouts_digest=blake3(raw).digest(),
        policy=policy,
        rewards=REWARDS,
        temperatures=list(temperatures),
        kept=[True, True],
    )


def test_files_that_cannot_be_read_are_named_and_nothing_is_trained_on(
    base: Path, tmp_path: Path
) -> None:
    service = started(base)
    names = ["good", "missing", "other", "garbage", "policy", "rewards"]
    made = {name: submission(base, tmp_path / name, policy=0) for name in names}
    (tmp_path / "missing").unlink()
    (tmp_path / "other").write_bytes((tmp_path / "good").read_bytes() + b"!")
    (tmp_path / "garbage").write_bytes(b"garbage")
    changes: dict[str, dict[str, Any]] = {
        "garbage": {"rollouts_digest": blake3(b"garbage").digest()},
        "policy": {"policy": 7},
        "rewards": {"rewards": [*REWARDS, [0.0]]},
    }
    for name, change in changes.items():
        made[name] = msgspec.structs.replace(made[name], **change)
    found = train(service, 0, *made.values())
    reasons = {names[each.index]: each.reason for each in found.unreadable}
    assert (found.figures, found.outcomes, list(reasons)) == ({}, [], names[1:])
    for name, words in {
        "missing": "No such file",
        "other": "its hash differs",
        "garbage": "no rollouts",
        "policy": "policy 7 is not held",
        "rewards": "7 rewards for 6 rollouts",
    }.items():
        assert words in reasons[name], reasons
    assert train(service, 0, made["good"]).figures["groups"] == 2


def test_a_run_through_the_service_and_on_after_a_restart(base: Path, tmp_path: Path) -> None:
    service = started(base)
    given = submission(base, tmp_path / "a", policy=0)
    first = train(service, 0, given)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=Trained) == first
    assert first.outcomes == [["consumed", "zero-advantage"]]
    assert first.figures["reward"] == pytest.approx(4 / 6)
    assert first.figures["engine_log_probability_difference"] < 1e-4
    trio.run(service.export, Export(folder=str(tmp_path / "policy-1")))
    trio.run(service.begin_save, BeginSave(state=str(tmp_path / "state")))
    trio.run(service.finish_save, FinishSave())

    restarted = TrainerService()
    again = trio.run(
        restarted.resume,
        Resume(start=start(base), folder=str(tmp_path / "state"), policies={0: str(base)}),
    )
    assert again == Resumed(step=1, consumed=[given.digest])
    second = submission(base, tmp_path / "b", policy=0)
    for each in (service, restarted):
        train(each, 1, second)
    trio.run(service.export, Export(folder=str(tmp_path / "through")))
    trio.run(restarted.export, Export(folder=str(tmp_path / "resumed")))
    weights = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("through", "resumed")
    ]
    assert weights[0] == weights[1]
    assert weights[0] != (tmp_path / "policy-1" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("claimed", [[1.0, 0.5], [0.5, 1.0]])
def test_each_group_is_scored_at_the_temperature_of_its_environment(
    base: Path, tmp_path: Path, claimed: list[float]
) -> None:
    given = submission(base, tmp_path / "a", policy=0, temperatures=[1.0, 0.5])
    given = msgspec.structs.replace(given, rewards=[REWARDS[0]] * 2, temperatures=claimed)
    found = train(started(base), 0, given)
    assert found.outcomes == [["consumed", "consumed"]]
    apart = found.figures["engine_log_probability_difference"]
    assert apart < 1e-4 if claimed == [1.0, 0.5] else apart > 0.1


def test_a_run_that_synthesises_trains_nothing(base: Path, tmp_path: Path) -> None:
    """All its graded groups count as consumed, also those whose rewards are equal."""
    service = TrainerService()
    job = start(base)
    terms = msgspec.structs.replace(job.terms, objective=Objective(name="synthesis"))
    trio.run(service.start, msgspec.structs.replace(job, terms=terms))
    given = submission(base, tmp_path / "a", policy=0)
    trio.run(service.score, ScoreAhead(submissions=[given]))
    assert train(service, 0, given).outcomes == [["consumed", "consumed"]]
    ungraded = msgspec.structs.replace(given, digest=bytes(32), ungraded=[1])
    assert train(service, 1, ungraded).outcomes == [["consumed", "zero-advantage"]]
    trio.run(service.export, Export(folder=str(tmp_path / "policy-2")))
    before, after = read_weights(base), read_weights(tmp_path / "policy-2")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_scored_ahead_a_step_is_the_same_to_the_last_bit(base: Path, tmp_path: Path) -> None:
    """Read and scored while the batch is not complete; a file that is damaged is left to the step,
    and one that was damaged since is not read again."""
    weights = []
    for ahead in (False, True):
        service = started(base)
        given = [submission(base, tmp_path / f"{ahead}-{name}", policy=0) for name in "ab"]
        gone = msgspec.structs.replace(given[0], digest=bytes(32), path=str(tmp_path / "gone"))
        train(service, 0, given[0])
        if ahead:
            for some in ([given[1], gone], [given[1]]):
                trio.run(service.score, ScoreAhead(submissions=some))
            Path(given[1].path).unlink()
            assert [each.index for each in train(service, 1, gone, given[1]).unreadable] == [0]
        figures = train(service, 1, given[1]).figures
        trio.run(service.export, Export(folder=str(tmp_path / f"policy-{ahead}")))
        weights.append((tmp_path / f"policy-{ahead}" / "model.safetensors").read_bytes())
        assert figures["kl_generation"] > 0
        again = train(service, 2, given[1])
        assert bool(again.unreadable) == ahead, "what was trained on is read again"
    assert weights[0] == weights[1]


def test_what_was_scored_ahead_is_scored_again_under_a_new_version(
    base: Path, tmp_path: Path
) -> None:
    """A new objective may need more than what was scored for the one before."""
    service = started(base)
    given = submission(base, tmp_path / "a", policy=0)
    trio.run(service.score, ScoreAhead(submissions=[given]))
    terms = start(base).terms
    trio.run(service.follow, Follow(terms=terms))
    Path(given.path).unlink()
    assert [each.index for each in train(service, 0, given).unreadable] == [0]


def test_what_was_scored_ahead_and_withdrawn_is_dropped(base: Path, tmp_path: Path) -> None:
    """Its worker was evicted, for example: no step will take it."""
    service = started(base)
    given = [submission(base, tmp_path / name, policy=0) for name in "ab"]
    trio.run(service.score, ScoreAhead(submissions=given))
    assert not train(service, 0, given[0]).unreadable
    Path(given[1].path).unlink()
    assert [each.index for each in train(service, 1, given[1]).unreadable] == [0]


@pytest.mark.slow
def test_a_damaged_file_ends_no_rank(base: Path, tmp_path: Path) -> None:
    """Only one rank hashes a file; in it an offset may be negative or huge."""
    made = [submission(base, tmp_path / name, policy=0) for name in "abc"]
    for each, offset in zip(made, (-3, 1 << 60), strict=False):
        path = Path(each.path)
        arrays = safetensors.numpy.load(path.read_bytes())
        arrays["token_offsets"][1] = offset
        path.write_bytes(safetensors.numpy.save(arrays))

    def work(ranks: Ranks) -> list[list[int]]:
        service = TrainerService(ranks)
        trio.run(service.start, start(base))
        orders = [made, made[::-1]]
        return [[each.index for each in train(service, 0, *some).unreadable] for some in orders]

    assert run_ranks(2, tmp_path, work) == [[[0, 1], [1, 2]]] * 2


def test_nothing_before_start() -> None:
    with pytest.raises(ValueError, match="start or resume"):
        train(TrainerService(), 0)


class Recording(SortDigits):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def tasks(self) -> Tasks:
        return self

    def draw(self, seed: bytes, split: Split) -> Task:
        task = super().tasks().draw(seed, split)
        self.prompts.append(as_text(task.prompt))
        return task


def copy(base: Path, folder: Path) -> Path:
    shutil.copytree(base, folder)
    return folder


def test_warm_up_draws_only_training_prompts_and_is_repeatable(base: Path, tmp_path: Path) -> None:
    recipe = Warmup(batch=16, steps_max=3)
    results = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        folder = copy(base, tmp_path / name)
        environment = Recording()
        assert warm_up(folder, [environment], seed, recipe) == 3
        assert len(set(environment.prompts)) == 3 * 16
        assert {split_of(prompt) for prompt in environment.prompts} == {"train"}
        results.append((folder / "model.safetensors").read_bytes())
    assert results[0] == results[1] != results[2]


def test_warm_up_stops_where_sampling_would_be_right_that_often(base: Path, tmp_path: Path) -> None:
    """Few answers, so that they are learned at once; what is asked for is what sampling gives."""

    class Easy(SortDigits):
        def tasks(self) -> Tasks:
            return self

        def draw(self, seed: bytes, split: Split) -> Task:
            return Task(prompt=f"{seed[0] % 2}>", answer=str(seed[0] % 2))

    folder = copy(base, tmp_path / "easy")
    taken = warm_up(folder, [Easy()], 1, Warmup(batch=64, accuracy=0.5, window=1, steps_max=100))
    assert 2 < taken < 100
    easy, renderer, rows = Easy(), Renderer(folder), range(256)
    work = [(easy, Task(prompt=f"{row % 2}>", answer=str(row % 2))) for row in rows]
    played = play(NativeEngine(folder), renderer, work, rows, (1, 2), SAMPLING).rollouts
    right = [
        grade_segments(easy, task, renderer, each.segments, SAMPLING.stop_ids).reward
        for (_, task), each in zip(work, played, strict=True)
    ]
    assert 0.4 < fmean(right) < 0.95


def test_renderer_and_demo_sampling_agree_on_the_stop_token(base: Path) -> None:
    renderer = Renderer(base)
    task = task_of(load_environment(ENVIRONMENT.name, ENVIRONMENT.version), bytes(32))
    tokens = [*renderer.encode_completion(task.answer), *SAMPLING.stop_ids]
    assert renderer.decode_completion(tokens, SAMPLING.stop_ids) == (task.answer, True)
    assert len(tokens) < SAMPLING.max_new_tokens


def test_an_attention_that_the_device_cannot_train_with_is_refused(base: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU has all of them")
    service = TrainerService()
    with pytest.raises(UserError, match="flex_attention has no backward pass"):
        trio.run(service.start, start(base, attention="flex_attention"))
    trio.run(service.start, start(base, attention="eager"))


def test_the_attentions_of_the_options_are_those_of_the_packer() -> None:
    assert get_args(Attention) == ("fastest", *ATTENTIONS)


def test_a_batch_may_hold_rollouts_of_two_versions_of_the_run(base: Path, tmp_path: Path) -> None:
    """Each is scored at the temperature, and read within the length limit, of its own."""
    service = started(base)
    cooler = msgspec.structs.replace(SAMPLING, temperature=0.5, max_new_tokens=12)
    submissions = [
        submission(base, tmp_path / str(number), 0, sampling)
        for number, sampling in enumerate((SAMPLING, cooler))
    ]
    terms = msgspec.structs.replace(
        start(base).terms, sampling=cooler, optimiser=Optimiser(learning_rate=1e-4, warmup_steps=0)
    )
    trio.run(service.follow, Follow(terms=terms))
    found = train(service, 0, *submissions).figures
    assert found["learning_rate"] == pytest.approx(1e-4)
    assert found["groups"] == 4 and found["engine_log_probability_difference"] < 1e-4
