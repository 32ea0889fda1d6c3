"""On-policy distillation: a teacher's log-probabilities as the advantage of every token."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio
from torch import Tensor

from benchmarks.groups import Group, as_accepted, make_batch
from peers.engines.demo import make_policy, make_tokenizer, save_tokenizer
from peers.engines.loading import load
from peers.environments import Message, Task
from peers.environments.interface import Conversation
from peers.learning.learner import Learner
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings
from peers.trainer.privileged import PrivilegedPrompts, filled
from peers.trainer.role import TrainerRole
from peers.trainer.service import TrainerService
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from swarm.settings import PeerSettings
from swarm.wire.manifest import EnvironmentReference, Objective, Schedule
from tests.engines.families import SUPPORTED, save_random
from tests.engines.families import log_probabilities as plain_log_probabilities
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_adapters import adapted, learn
from tests.trainer.test_general_families import base_of
from tests.trainer.test_learner import log_probabilities, random_groups, settings, teach
from tests.trainer.test_service import start, submission, train

TEMPLATE = "{answer}={prompt}"
SORT = EnvironmentReference(name="sort-digits", version="1")


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    folder = tmp_path / "teacher"
    make_policy(folder, seed=7)
    return folder


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A teacher of another family and size, with the same tokenizer."""
    folder = tmp_path / "other"
    config = deepcopy(SUPPORTED["qwen3-moe"])
    config.vocab_size = 64
    save_random(config, folder, seed=0)
    save_tokenizer(folder)
    return folder


def taught(folder: Path | str, made: LearnerSettings | None = None) -> LearnerSettings:
    return dataclasses.replace(made or settings(teacher_weight=1.0), teacher=str(folder))


def under_teacher(
    learner: Learner, groups: list[Group], prompts: list[list[int]] | None = None
) -> Tensor:
    """Log-probabilities of this rank's completion tokens, fp32 [n]."""
    (given,) = as_accepted(groups, "", learner.policy.ranks)
    given.teacher_prompts = prompts
    learner.score([given])
    assert given.log_teacher is not None
    return given.log_teacher


def plainly(folder: Path, prompts: list[list[int]], groups: list[Group]) -> Tensor:
    """The same by transformers' own module, sequence by sequence."""
    model = load(folder).float().eval()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    found = []
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        written = rollout.model_tokens
        values = plain_log_probabilities(model, [*prompt, *written])[len(prompt) - 1 :]
        found.append(values[range(len(written)), torch.tensor(written)])
    return torch.cat(found)


def own_prompts(groups: list[Group]) -> list[list[int]]:
    return [list(rollout.prompt) for group in groups for rollout in group.rollouts]


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


def test_the_teacher_of_adapters_may_be_an_adapter(base: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("adapters", [False, True])
def test_a_teacher_of_another_size_says_what_it_says_alone(
    base: Path, other: Path, adapters: bool
) -> None:
    made = adapted(teacher_weight=1.0) if adapters else settings(teacher_weight=1.0)
    learner, groups = Learner(base, taught(other, made)), random_groups(1, policy=0)
    wanted = plainly(other, own_prompts(groups[:-1]), groups[:-1])
    groups[-1] = dataclasses.replace(groups[-1], kept=False)
    found = under_teacher(learner, groups)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    gap = log_probabilities(learner.model, make_batch(groups[:-1])) - wanted
    figures = teach(learner, groups, 0)
    assert figures["kl_teacher"] == pytest.approx(float(gap.mean()), abs=1e-3)
    assert figures["untaught"] == 0
    assert not learner.policy.optimiser.state.keys() - set(learner.policy.trained().values())


def test_a_teacher_that_must_not_be_packed(base: Path, tmp_path: Path) -> None:
    """Its layout is found for itself, whatever the policy's is."""
    folder = base_of("bloom", tmp_path / "bloom")
    learner = Learner(base, dataclasses.replace(taught(folder), flat=True))
    groups = random_groups(1, policy=0)[:-1]
    found = under_teacher(learner, groups)
    torch.testing.assert_close(
        found, plainly(folder, own_prompts(groups), groups), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("sharding", [{}, {"cpu_offload": True}, {"sequence_parallel": 2}])
def test_a_teacher_spread_over_two_ranks_says_the_same(
    base: Path, other: Path, tmp_path: Path, sharding: Any
) -> None:
    groups = random_groups(1, policy=0)[:-1]
    wanted = plainly(other, own_prompts(groups), groups)

    def work(ranks: Ranks) -> tuple[Tensor, list[int], list[float]]:
        made = dataclasses.replace(taught(other), sharding=Sharding(**sharding))
        learner = Learner(base, made, ranks=ranks)
        (given,) = as_accepted(groups, "", ranks)
        found = under_teacher(learner, groups)
        figures = teach(learner, groups, 0)
        return found, given.rows.tolist(), [figures["kl_teacher"], figures["gradient_norm"]]

    starts = [0]
    for group in groups:
        for each in group.rollouts:
            starts.append(starts[-1] + len(each.model_tokens))
    results = run_ranks(2, tmp_path, work)
    assert results[0][2] == results[1][2]
    for found, rows, _ in results:
        mine = torch.cat([wanted[starts[row] : starts[row + 1]] for row in rows])
        torch.testing.assert_close(found, mine, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("whose", ["base", "own", "adapters"])
def test_a_privileged_prompt_is_read_before_the_same_completion(
    base: Path, other: Path, whose: str
) -> None:
    """Without a teacher named, the base reads it. What cannot be read costs itself."""
    changes: Any = {"teacher_weight": 0.5, "teacher_prompt": TEMPLATE}
    made = adapted(**changes) if whose == "adapters" else settings(**changes)
    learner = Learner(base, taught(other if whose == "own" else "", made))
    groups = random_groups(1, policy=0)[:-1]
    prompts = [[1, 9, 8, 7, 5, *prompt] for prompt in own_prompts(groups)]
    folder = other if whose == "own" else base
    wanted = plainly(folder, prompts, groups)
    torch.testing.assert_close(
        under_teacher(learner, groups, prompts), wanted, atol=1e-5, rtol=1e-5
    )
    lengths = [len(each.model_tokens) for group in groups for each in group.rollouts]
    prompts[1] = []  # it has none
    prompts[2] = [5] * 64  # longer than the teacher's positions
    prompts[4] = [64]  # a token that it does not have
    found = under_teacher(learner, groups, prompts).split(lengths)
    for row, (mine, whole) in enumerate(zip(found, wanted.split(lengths), strict=True)):
        if row in (1, 2, 4):
            assert mine.isnan().all()
        else:
            torch.testing.assert_close(mine, whole, atol=1e-5, rtol=1e-5)
    (given,) = as_accepted(groups)
    given.teacher_prompts = prompts
    figures = learner.train_step([given], 0)
    lost = sum(lengths[row] for row in (1, 2, 4))
    assert figures["untaught"] == pytest.approx(lost / sum(lengths))
    assert figures["skipped"] == 0 and math.isfinite(figures["loss"])


def test_an_untaught_token_keeps_its_share_of_the_advantage(base: Path) -> None:
    """As if the teacher agreed with the policy: rewards alone move it, and with w = 1 nothing."""
    groups = random_groups(1, policy=0)[:-1]
    norms = {}
    for weight in (0.0, 0.5, 1.0):
        prompt = TEMPLATE if weight else ""
        learner = Learner(base, taught("", settings(teacher_weight=weight, teacher_prompt=prompt)))
        (given,) = as_accepted(groups)
        given.teacher_prompts = [[] for _ in given.rows]
        norms[weight] = learner.train_step([given], 0)["gradient_norm"]
    assert norms[1.0] == 0 and norms[0.5] == pytest.approx(norms[0.0] / 2, rel=1e-4)


def test_the_trainer_draws_the_tasks_of_a_submission_again(base: Path, tmp_path: Path) -> None:
    """By its seed. Where the prompts are others than its own, the teacher says nothing."""
    job = start(base)
    objective = msgspec.structs.replace(
        job.terms.objective, teacher_weight=0.5, teacher_prompt=TEMPLATE
    )
    terms = msgspec.structs.replace(job.terms, objective=objective, environments=[SORT])
    prompts = PrivilegedPrompts(base, terms)
    tokenizer, seed = make_tokenizer(), bytes(31) + b"7"
    tasks = [prompts._environments.task([SORT], seed, group, prompts._room) for group in (0, 1)]
    own = [task.tokens for task in tasks]
    made = submission(base, tmp_path / "file", policy=0, prompts=own)
    found = {}
    for name, given in {"right": seed, "wrong": bytes(32), "older": b""}.items():
        service = TrainerService()
        trio.run(service.start, start(base, terms=terms))
        found[name] = train(service, 0, msgspec.structs.replace(made, seed=given)).figures
        if name == "right":
            (each,) = service._read([msgspec.structs.replace(made, seed=seed)])[0]
            wanted = [
                tokenizer.encode(f"{task.task.answer}={task.task.prompt}").ids for task in tasks
            ]
            assert each.teacher_prompts == [wanted[0]] * 3  # the other group is of equal rewards
    assert found["right"]["untaught"] == 0 and found["right"]["kl_teacher"] != 0
    assert found["wrong"]["untaught"] == found["older"]["untaught"] == 1
    with pytest.raises(UserError, match="'nowhere' is not installed here"):
        nowhere = [EnvironmentReference(name="nowhere", version="1")]
        other = msgspec.structs.replace(terms, environments=nowhere)
        trio.run(TrainerService().start, start(base, terms=other))


def test_a_template_is_filled_with_what_a_task_has() -> None:
    task = Task("2+2", "4", data={"hint": "an even number", "digits": 1})
    assert filled("{hint} ({digits}): {prompt} {answer}", task) == "an even number (1): 2+2 4"
    assert filled("{prompt}{missing}", task) is None
    assert filled("{prompt}{answer}", Task("2+2", "")) is None
    several = Task("2+2", "", demonstration=("3?", "4"))
    assert filled("{prompt}: {answer}", several) == "2+2: 3?\n4"
    chat = Conversation((Message("system", "be"), Message("user", "2+2")), (("thinking", True),))
    asked = dataclasses.replace(task, prompt=chat, inner=task)
    wanted = (Message("system", "be"), Message("user", "2+2 4"))
    assert filled("{prompt} {answer}", asked) == Conversation(wanted, (("thinking", True),))


@pytest.mark.parametrize(
    "change",
    [
        {"teacher_weight": 0.5, "teacher_prompt": "{answer}"},
        {"teacher_weight": 0.0, "teacher_prompt": TEMPLATE},
    ],
)
def test_a_prompt_that_no_teacher_reads_is_refused(change: Any) -> None:
    with pytest.raises(UserError, match=r"it must hold .prompt., and needs a teacher_weight"):
        made = msgspec.structs.replace(Objective(), **change)
        LearnerSettings(made, Schedule(steps=1, groups_per_step=1))


def test_a_teacher_is_found_as_a_model_is(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the user's home, for example; what is no model is refused before the start."""
    monkeypatch.setenv("HOME", str(base.parent))
    found = PeerSettings(tables={"trainer": {"model": str(base), "teacher": f"~/{base.name}"}})
    TrainerRole.check(found)
    assert found.tables["trainer"]["teacher"] == str(base)
    (tmp_path / "expert.gguf").write_bytes(b"no model")
    for given in ("nowhere", f"{tmp_path}/expert.gguf"):
        wrong = PeerSettings(tables={"trainer": {"model": str(base), "teacher": given}})
        with pytest.raises(UserError, match=r"trainer\.teacher|expert\.gguf"):
            TrainerRole.check(wrong)


def test_a_teacher_that_cannot_judge_is_refused(base: Path, teacher: Path, tmp_path: Path) -> None:
    chosen = settings(teacher_weight=0.5)
    with pytest.raises(UserError, match=r"set teacher under .trainer. to a model"):
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
    shutil.copytree(teacher, tmp_path / "wrong")
    save_tokenizer(tmp_path / "wrong")
    config = json.loads((teacher / "config.json").read_text())
    (tmp_path / "wrong/config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    with pytest.raises(UserError, match=r"holds another model than its config.json"):
        Learner(base, taught(tmp_path / "wrong"))
