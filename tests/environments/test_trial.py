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
from peers.environments import Episodes, Generated, NotGradable, SingleTurn, Task, Tasks, Transcript
from peers.environments.trial import Trial
from swarm.jobs.environment import TrialSetup, Tried, TryEnvironment

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


def tried(environment: SingleTurn) -> Tried:
    trial = Trial(TrialSetup(environment="sort-digits", options={}))
    trial._environment = environment
    return trio.run(trial.play, TryEnvironment(tasks=20, graded=2))


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
            of(tasks=lambda _: Generated(lambda r: Task(r.hex(), str(1 / 0)))),
            "cannot draw a task (ZeroDivisionError",
        ),
        (Turns(), "ends the episode after '1', but the task's demonstration goes on"),
    ],
)
def test_a_fault_is_a_sentence(environment: SingleTurn, sentence: str) -> None:
    fault, *_ = tried(environment).faults
    assert sentence in fault
    assert "environment 'lab' " in fault or "a task's data" in fault


def test_a_sound_environment_has_none() -> None:
    found = tried(Lab())
    assert found.faults == found.warnings == []
    assert found.different == 20
    assert found.answer_rewards == [1.0, 1.0] and set(found.junk_rewards) == {0.0}
    assert found.answers == tried(Lab()).answers


def test_a_task_that_changes_from_call_to_call_has_other_answers() -> None:
    changing = of(tasks=lambda _: Generated(lambda r: Task(r.hex(), str(next(COUNTER)))))
    assert tried(changing).answers != tried(changing).answers


def test_splits_that_share_a_prompt_are_a_fault() -> None:
    class Same:
        def draw(self, *_: Any) -> Task:
            return Task("same", "7")

    assert "as a training task and as a held-out" in tried(of(tasks=lambda _: Same())).faults[0]


def test_junk_with_full_reward_and_unknown_rewards_are_warned_of() -> None:
    found = tried(of(grade=lambda _, task, transcript: float(len(transcript.text) > 1000)))
    assert found.answer_rewards == [0.0, 0.0]
    assert any("full reward: task 0, a huge number (finished)" in each for each in found.warnings)
    found = tried(of(grade=raises(NotGradable("no judge; start it"))))
    assert found.faults == [] and found.not_gradable > 10 and found.junk_rewards == []
    silent = type("Silent", (Turns,), {"step": raises(NotGradable("no tool; start it"))})
    found = tried(silent())
    assert found.faults == [] and found.not_gradable > 10
    assert "'lab' cannot know its answer to the turn" in found.warnings[-1]


def test_with_a_tokenizer_prompts_are_rendered(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    trial = Trial(TrialSetup(environment="calculator", options={}, model=str(tmp_path)))
    found = trio.run(trial.play, TryEnvironment(tasks=3, graded=2))
    assert found.faults == [] and len(found.probe_hash) == 64 and found.several_turns
    assert [len(tokens) for tokens in (found.prompt_tokens, found.answer_tokens)] == [3, 3]
    assert found.answer_rewards == [1.0, 1.0]
