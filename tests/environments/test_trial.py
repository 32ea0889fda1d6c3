"""What `swarm environment check` finds in an environment."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from peers.engines.demo import save_tokenizer
from peers.environments import (
    Episodes,
    Generated,
    NotGradable,
    SingleTurn,
    Task,
    TaskList,
    Tasks,
    Transcript,
)
from peers.environments.tasks import Curriculum, held_out_share
from peers.environments.trial import Catalogue, Trial
from swarm.jobs.environment import (
    Describe,
    DrawTrial,
    GradeTrial,
    ListInstalled,
    TrialDrawn,
    TrialGraded,
    TrialSetup,
)

COUNTER = itertools.count()


def digits(randomness: bytes) -> Task:
    return Task(f"{int.from_bytes(randomness[:4], 'big')}>", "7")


class Lab(SingleTurn):
    """Right in everything that a test does not change."""

    name, version = "lab", "1"

    def tasks(self) -> Tasks:
        return Generated(digits)

    def grade(self, task: Task, transcript: Transcript) -> Any:
        return float(transcript.text == task.answer)


class Turns(Lab, Episodes):
    def start(self, task: Task) -> None:
        pass

    def step(self, state: None, text: str) -> str | None:
        return None

    def tasks(self) -> Tasks:
        return Generated(lambda r: replace(digits(r), demonstration=("1", "7")))


def tried(environment: SingleTurn) -> tuple[TrialDrawn, TrialGraded]:
    trial = Trial(TrialSetup(environment="sort-digits", options={}))
    trial._environment = environment

    async def main() -> tuple[TrialDrawn, TrialGraded]:
        return await trial.draw(DrawTrial(tasks=20)), await trial.grade(GradeTrial(tasks=2))

    return trio.run(main)


def of(**methods: Callable[..., Any]) -> SingleTurn:
    return type("Changed", (Lab,), methods)()


def raises(error: Exception) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise error

    return act


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (of(grade=raises(ZeroDivisionError("no"))), "cannot grade the completion '7' (ZeroDivis"),
        (of(grade=raises(MemoryError())), "cannot grade the completion '7' (MemoryError"),
        (of(grade=lambda *_: 1.2), "the reward 1.2; it must be a number in [0, 1]"),
        (of(grade=lambda *_: float("nan")), "the reward nan; it must be a number in [0, 1]"),
        (of(grade=lambda *_: random.random()), "equal texts must get equal rewards"),
        (of(tasks=raises(OSError("gone"))), "cannot draw a task (OSError: gone)"),
        (
            of(tasks=lambda _: Generated(lambda r: Task(r.hex(), "", {"kind": {1}}))),
            "a task's data is {'kind': {1}}, which is not JSON",
        ),
        (
            of(tasks=lambda _: Curriculum(lambda r, step: Task(r.hex(), str(1 / (step - 1000))))),
            "cannot draw a task (ZeroDivisionError",
        ),
        (Turns(), "ends the episode after '1', but the task's demonstration goes on"),
    ],
)
def test_a_fault_is_a_sentence(environment: SingleTurn, sentence: str) -> None:
    faults = [fault for part in tried(environment) for fault in part.faults]
    assert any(sentence in fault for fault in faults), faults
    assert all("environment 'lab' " in fault or "a task's data" in fault for fault in faults)


def test_a_sound_environment_has_none() -> None:
    drawn, graded = tried(Lab())
    assert drawn.faults == graded.faults == graded.warnings == []
    assert drawn.different == 20 and 0.03 < (drawn.held_out_share or 0) < 0.1
    assert graded.answer_rewards == [1.0, 1.0] and set(graded.junk_rewards) == {0.0}
    assert (drawn, drawn.answers) == (drawn, tried(Lab())[0].answers)


def test_a_task_that_changes_from_call_to_call_has_other_answers() -> None:
    changing = of(tasks=lambda _: Generated(lambda r: Task(r.hex(), str(next(COUNTER)))))
    assert tried(changing)[0].answers != tried(changing)[0].answers


def test_splits_that_share_a_prompt_are_a_fault() -> None:
    class Same:
        def draw(self, *_: Any) -> Task:
            return Task("same", "7")

    drawn, _ = tried(of(tasks=lambda _: Same()))
    assert (
        drawn.held_out_share is None and "as a training task and as a held-out" in drawn.faults[0]
    )


def test_junk_with_full_reward_and_unknown_rewards_are_warned_of() -> None:
    generous = of(grade=lambda _, task, transcript: float(len(transcript.text) > 1000))
    _, graded = tried(generous)
    assert graded.answer_rewards == [0.0, 0.0]
    assert any("full reward: task 0, a huge number (finished)" in each for each in graded.warnings)
    _, graded = tried(of(grade=raises(NotGradable("no judge; start it"))))
    assert graded.faults == [] and graded.not_gradable > 10 and graded.junk_rewards == []
    silent = type("Silent", (Turns,), {"step": raises(NotGradable("no tool; start it"))})
    _, graded = tried(silent())
    assert graded.faults == [] and graded.not_gradable > 10
    assert "'lab' cannot know its answer to the turn" in graded.warnings[-1]


def test_the_share_that_is_held_out() -> None:
    listed = TaskList([Task(str(number), "") for number in range(3000)])
    assert 0.03 < (held_out_share(listed) or 0) < 0.1
    assert held_out_share(TaskList([])) is None


def test_with_a_tokenizer_prompts_are_rendered(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    trial = Trial(TrialSetup(environment="calculator", options={}, model=str(tmp_path)))
    drawn = trio.run(trial.draw, DrawTrial(tasks=3))
    assert drawn.faults == [] and len(drawn.probe_hash) == 64
    assert [len(tokens) for tokens in (drawn.prompt_tokens, drawn.answer_tokens)] == [3, 3]
    assert trio.run(trial.describe, Describe()).several_turns
    graded = trio.run(trial.grade, GradeTrial(tasks=2))
    assert graded.answer_rewards == [1.0, 1.0] and graded.step_seconds


def test_the_catalogue_names_versions_and_options() -> None:
    found = {each.name: each for each in trio.run(Catalogue().list, ListInstalled()).environments}
    assert found["calculator"].several_turns and found["calculator"].options == ["digits"]
    assert (found["sort-digits"].version, found["sort-digits"].package) == ("1", "")
