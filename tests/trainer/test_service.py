from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from blake3 import blake3

from peers.demo import ENVIRONMENT, SAMPLING
from peers.environments import Renderer
from peers.environments import load as load_environment
from peers.environments.base import Task, split_of
from peers.environments.sort_digits import SortDigits
from peers.policy.demo import BOS_ID
from peers.policy.native import NativeEngine
from peers.trainer.evaluation import mean_reward
from peers.trainer.learning.packing import ATTENTIONS
from peers.trainer.options import Attention
from peers.trainer.service import TrainerService
from peers.trainer.warmup import Warmup, warm_up
from swarm.errors import UserError
from swarm.messages import Objective, Optimiser, Sampling, Schedule
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import Header, write

REWARDS = [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0]]


def run_arguments(base: Path) -> dict[str, Any]:
    objective = Objective(kl_coefficient=0, entropy_coefficient=0)
    return {
        "model": str(base),
        "objective": msgspec.structs.asdict(objective),
        "optimiser": msgspec.structs.asdict(Optimiser(learning_rate=1e-3)),
        "schedule": msgspec.structs.asdict(Schedule(steps=4, groups_per_step=2)),
        "sampling": msgspec.structs.asdict(SAMPLING),
        "environments": [ENVIRONMENT],
        "seed": 0,
    }


def submission(
    base: Path, path: Path, policy: int, sampling: Sampling = SAMPLING
) -> dict[str, Any]:
    """A file of 2 groups × 3, sampled by the engine, as a worker writes it."""
    prompts = [[BOS_ID, 4, 5, 14], [BOS_ID, 6, 14]]
    rows = [prompt for prompt in prompts for _ in range(3)]
    made = NativeEngine(base).generate(
        rows,
        range(6),
        (policy, 1),
        sampling.temperature,
        sampling.stop_ids,
        sampling.max_new_tokens,
    )
    rollouts = Rollouts.from_lists(
        group=[0, 0, 0, 1, 1, 1],
        sample=[0, 1, 2, 0, 1, 2],
        target_length=[0] * 6,
        prompts=rows,
        completions=made.tokens,
        log_probabilities=[row.tolist() for row in made.log_probabilities],
        proofs=[bytes(258)] * 6,
    )
    header = Header(
        run="owner/demo",
        lineage=0,
        step=policy,
        policy=policy,
        worker="Q" * 46,
        number=0,
        environments=[("sort-digits", "1")],
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        stop_ids=sampling.stop_ids,
        engine="native",
    )
    digest, _ = write(path, rollouts, header)
    return {"digest": digest.hex(), "path": str(path), "policy": policy, "rewards": REWARDS}


def crossed(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value after its way over a child's pipe."""
    result: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    return result


def test_files_that_cannot_be_read_are_named_and_nothing_is_trained_on(
    base: Path, tmp_path: Path
) -> None:
    service = TrainerService()
    service.start(**crossed(run_arguments(base)))
    names = ["good", "missing", "other", "garbage", "policy", "rewards"]
    made = {name: submission(base, tmp_path / name, policy=0) for name in names}
    (tmp_path / "missing").unlink()
    (tmp_path / "other").write_bytes((tmp_path / "good").read_bytes() + b"!")
    (tmp_path / "garbage").write_bytes(b"garbage")
    made["garbage"]["digest"] = blake3(b"garbage").hexdigest()
    made["policy"]["policy"] = 7
    made["rewards"]["rewards"] = [*REWARDS, [0.0]]
    found = crossed(service.train(**crossed({"step": 0, "submissions": list(made.values())})))
    reasons = {names[index]: reason for index, reason in found.pop("unreadable")}
    assert (found, list(reasons)) == ({}, names[1:])
    for name, words in {
        "missing": "No such file",
        "other": "its hash differs",
        "garbage": "no sound Parquet",
        "policy": "policy 7 is not held",
        "rewards": "7 rewards for 6 completions",
    }.items():
        assert words in reasons[name], reasons
    assert service.train(**crossed({"step": 0, "submissions": [made["good"]]}))["groups"] == 2


def test_a_run_through_the_service_and_on_after_a_restart(base: Path, tmp_path: Path) -> None:
    service = TrainerService()
    assert service.start(**crossed(run_arguments(base))) == {"step": 0}
    given = submission(base, tmp_path / "a", policy=0)
    first = crossed(service.train(**crossed({"step": 0, "submissions": [given]})))
    assert first["outcomes"] == [["consumed", "zero-advantage"]]
    assert first["reward"] == pytest.approx(4 / 6)
    assert first["engine_log_probability_difference"] < 1e-4
    assert service.export(str(tmp_path / "policy-1")) == {}
    assert service.begin_save(str(tmp_path / "state")) == service.finish_save() == {}

    restarted = TrainerService()
    again = restarted.resume(
        **crossed(
            {
                **run_arguments(base),
                "folder": str(tmp_path / "state"),
                "policies": {"0": str(base)},
            }
        )
    )
    assert again == {"step": 1, "consumed": [given["digest"]]}
    second = submission(base, tmp_path / "b", policy=0)
    for each in (service, restarted):
        each.train(step=1, submissions=[second])
    service.export(str(tmp_path / "through"))
    restarted.export(str(tmp_path / "resumed"))
    weights = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("through", "resumed")
    ]
    assert weights[0] == weights[1]
    assert weights[0] != (tmp_path / "policy-1" / "model.safetensors").read_bytes()
    assert crossed(restarted.evaluate(str(tmp_path / "resumed"), 8, "held_out")) == {
        "sampled": 0,
        "greedy": 0,
        "environments": {"sort-digits": {"sampled": 0, "greedy": 0}},
    }


def test_nothing_before_start() -> None:
    with pytest.raises(ValueError, match="start or resume"):
        TrainerService().train(step=0, submissions=[])


class Recording(SortDigits):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def task(self, seed: bytes, split: Any = "train") -> Task:
        task = super().task(seed, split)
        self.prompts.append(task.prompt)
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
        assert warm_up(folder, environment, seed, recipe) == 3
        assert len(set(environment.prompts)) == 3 * 16
        assert {split_of(prompt) for prompt in environment.prompts} == {"train"}
        results.append((folder / "model.safetensors").read_bytes())
    assert results[0] == results[1] != results[2]


def test_warm_up_stops_where_sampling_would_be_right_that_often(base: Path, tmp_path: Path) -> None:
    """Few answers, so that they are learned at once; what is asked for is what sampling gives."""

    class Easy(SortDigits):
        def task(self, seed: bytes, split: Any = "train") -> Task:
            return Task(prompt=f"{seed[0] % 2}>", answer=str(seed[0] % 2))

    folder = copy(base, tmp_path / "easy")
    taken = warm_up(folder, Easy(), 1, Warmup(batch=64, accuracy=0.5, window=1, steps_max=100))
    assert 2 < taken < 100
    accuracy = mean_reward(NativeEngine(folder), Easy(), folder, SAMPLING, prompts=256)
    assert 0.4 < accuracy < 0.95


def test_evaluation_asks_the_same_held_out_prompts_of_every_policy(base: Path) -> None:
    engine = NativeEngine(base)
    asked = []
    for greedy in (False, True):
        environment = Recording()
        mean_reward(engine, environment, base, SAMPLING, prompts=40, greedy=greedy)
        asked.append(environment.prompts)
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == 40
    assert {split_of(prompt) for prompt in asked[0]} == {"held_out"}


def test_evaluation_counts_right_answers(base: Path) -> None:
    """An environment that calls every second answer right gives one half."""

    class EverySecond(Recording):
        count = 0

        def reward(self, task: Task, completion_text: str, finished: bool) -> float:
            self.count += 1
            return float(self.count % 2)

    share = mean_reward(NativeEngine(base), EverySecond(), base, SAMPLING, prompts=130)
    assert share == 0.5


def test_renderer_and_demo_sampling_agree_on_the_stop_token(base: Path) -> None:
    renderer = Renderer(base)
    task = load_environment(ENVIRONMENT.name, ENVIRONMENT.version).task(bytes(32))
    tokens = [*renderer.encode_completion(task.answer), *SAMPLING.stop_ids]
    assert renderer.decode_completion(tokens, SAMPLING.stop_ids) == (task.answer, True)
    assert len(tokens) < SAMPLING.max_new_tokens


def test_an_attention_that_the_device_cannot_train_with_is_refused(base: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU has all of them")
    service = TrainerService()
    with pytest.raises(UserError, match="flex_attention has no backward pass"):
        service.start(**run_arguments(base), attention="flex_attention")
    service.start(**run_arguments(base), attention="eager")


def test_the_attentions_of_the_options_are_those_of_the_packer() -> None:
    assert get_args(Attention) == ("fastest", *ATTENTIONS)


def test_a_batch_may_hold_rollouts_of_two_versions_of_the_run(base: Path, tmp_path: Path) -> None:
    """Each is scored at the temperature, and read within the length limit, of its own."""
    service = TrainerService()
    arguments = run_arguments(base)
    service.start(**crossed(arguments))
    cooler = msgspec.structs.replace(SAMPLING, temperature=0.5, max_new_tokens=12)
    submissions = []
    for number, sampling in enumerate((SAMPLING, cooler)):
        made = submission(base, tmp_path / str(number), 0, sampling)
        submissions.append(made | {"sampling": msgspec.structs.asdict(sampling)})
    changed = {name: arguments[name] for name in ("objective", "optimiser", "schedule")}
    changed["sampling"] = msgspec.structs.asdict(cooler)
    changed["optimiser"] = changed["optimiser"] | {"learning_rate": 1e-4, "warmup_steps": 0}
    assert service.follow(**crossed(changed)) == {}
    found = service.train(**crossed({"step": 0, "submissions": submissions}))
    assert found["learning_rate"] == pytest.approx(1e-4)
    assert found["groups"] == 4 and found["engine_log_probability_difference"] < 1e-4
