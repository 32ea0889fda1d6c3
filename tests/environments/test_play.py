"""Calls of an environment's code: whatever it does, the caller gets one sentence."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio

from peers.environments import (
    Episode,
    Grade,
    NotGradable,
    Task,
    Tasks,
    Transcript,
    grade,
    play,
    task_of,
)
from peers.environments.calculator import Calculator
from swarm.errors import UserError
from swarm.world.progress import HUNG_STATUS, Reporter, current

TASK = Task("1+1>", "2")
COMPLETION = Transcript.of("1+1=")


class Lab(Calculator):
    """Does what a test wants it to do."""

    name = "lab"
    call_seconds = 0.05

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def tasks(self) -> Tasks:
        return self.act()  # type: ignore[no-any-return]

    def step(self, state: Any, text: str) -> Any:
        return self.act()

    def grade(self, task: Task, transcript: Transcript) -> Any:
        return self.act()


def endless() -> None:
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


@pytest.mark.parametrize(
    ("call", "doing"),
    [
        (lambda lab: grade(lab, TASK, COMPLETION), r"grade the completion '1\+1='"),
        (lambda lab: Episode(lab, TASK).step("1+1="), r"answer the turn '1\+1='"),
        (lambda lab: task_of(lab, b"seed"), "draw a task"),
    ],
)
def test_a_call_without_end_is_ended(call: Callable[[Lab], Any], doing: str) -> None:
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(UserError, match=f"'lab' took more than 0.05 s to {doing}; make it"):
            call(Lab(endless))
    assert time.monotonic() - began < 5
    assert grade(Calculator(), TASK, COMPLETION) == Grade(0.0), "nothing arrives later"


def test_a_long_call_within_its_limit_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the owner of the process would take it for hung."""
    monkeypatch.setattr(play, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(play, "limited", play._Watch().limited)
    heard = threading.Event()

    async def main() -> None:
        current.set(Reporter(heard.set))
        lab = Lab(lambda: float(heard.wait(20)))
        lab.call_seconds = 30.0
        assert (await trio.to_thread.run_sync(grade, lab, TASK, COMPLETION)).reward == 1.0

    trio.run(main)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


BLOCKED = """
import time
from peers.environments import play
from tests.environments.test_play import COMPLETION, TASK, Lab, grade
play.GRACE_SECONDS = 0.05
grade(Lab(lambda: time.sleep(60)), TASK, COMPLETION)
"""


def test_a_call_that_cannot_be_ended_ends_the_process_with_the_sentence() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == HUNG_STATUS
    assert ended.stderr.startswith("environment 'lab' took more than 0.05 s to grade")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (1.2, r"the reward 1.2; it must be a number in \[0, 1\]"),
        (-0.1, "the reward -0.1; it must be"),
        (float("nan"), "the reward nan; it must be"),
        (None, "the reward None; it must be"),
        (Grade(2), "the reward 2; it must be"),
        (Grade(1, {"form": float("inf")}), "the part 'form' = inf; it must be a name with"),
        (Grade(1, {"form": 10**400}), "the part 'form' = 1000*; it must be a name with"),
        (Grade(1, {"\ud800": 1.0}), r"the part '\\ud800' = 1.0; it must be a name with"),
        (Grade(1, [1]), r"the parts \[1\]; they must be a dictionary"),  # type: ignore[arg-type]
        (Unprintable(), "the reward an object of Unprintable that cannot be printed; it must be"),
    ],
)
def test_a_reward_out_of_bounds_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=f"'lab' gives the completion .* {sentence}"):
        grade(Lab(lambda: given), TASK, COMPLETION)


class UnprintableError(BaseException):
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UnprintableError(), r"\(UnprintableError: its message cannot be printed\)"),
        (GeneratorExit(), "GeneratorExit"),
        (BaseExceptionGroup("all", [SystemExit(1)]), "BaseExceptionGroup: all"),
        (trio.Cancelled._create(source="explicit"), "Cancelled: cancelled due to explicit"),
    ],
)
def test_no_kind_of_error_passes(error: BaseException, sentence: str) -> None:
    """A validator would call it a failure of its own, and withhold the worker's credit."""

    def act() -> None:
        raise error

    calls: list[Callable[[], Any]] = [
        lambda: grade(Lab(act), TASK, COMPLETION),
        lambda: Episode(Lab(act), TASK).step("1+1="),
        lambda: task_of(Lab(act), b"seed"),
    ]
    for call in calls:
        with pytest.raises(UserError, match=f"'lab' cannot .*{sentence}"):
            call()


def test_the_jobs_own_cancellation_passes() -> None:
    async def main() -> None:
        def act() -> None:
            trio.from_thread.run_sync(scope.cancel)
            trio.from_thread.check_cancelled()

        lab = Lab(act)
        lab.call_seconds = 30.0
        with trio.CancelScope() as scope:
            await trio.to_thread.run_sync(grade, lab, TASK, COMPLETION)
        assert scope.cancelled_caught

    trio.run(main)


def test_ctrl_c_passes() -> None:
    def act() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        task_of(Lab(act), b"seed")


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (Task("1>", 7), "whose answer is 7; it must be text"),  # type: ignore[arg-type]
        (Task("1>", "\ud800"), r"whose answer is '\\ud800'; it must be text"),
        (Task("\ud800", "7"), "must be a Task with a prompt of text or a tuple of messages"),
        (Task("1>", "7", demonstration="12"), "whose demonstration is '12'"),  # type: ignore[arg-type]
        (Task("1>", "7", target_length=-1), "whose target_length is -1; it must be a number"),
        (Task("1>", "7", target_length=1 << 32), "whose target_length is 4294967296"),
    ],
)
def test_a_task_that_cannot_be_rendered_is_refused(task: Task, sentence: str) -> None:
    class Drawn:
        def draw(self, *_: Any) -> Task:
            return task

    with pytest.raises(UserError, match=f"environment 'lab' draws .*{sentence}"):
        task_of(Lab(Drawn), b"seed")


def test_a_grade_keeps_its_parts() -> None:
    assert grade(Lab(lambda: True), TASK, COMPLETION) == Grade(1.0)
    assert grade(Lab(lambda: Grade(0.5, {"form": 1})), TASK, COMPLETION).parts == {"form": 1.0}


def test_what_cannot_be_graded_is_told_apart_from_a_failure() -> None:
    def unknown() -> None:
        raise NotGradable("the judge does not answer; start it")

    with pytest.raises(NotGradable, match=r"'lab' cannot know the reward .*: the judge does not"):
        grade(Lab(unknown), TASK, COMPLETION)
    with pytest.raises(NotGradable, match=r"'lab' cannot know its answer to .*: the judge"):
        Episode(Lab(unknown), TASK).step("1+1=")


def test_the_observation_may_be_messages_and_nothing_else() -> None:
    with pytest.raises(
        UserError, match=r"with \(\); it must be text, a tuple of messages, or None"
    ):
        Episode(Lab(lambda: ()), TASK).step("1+1=")
