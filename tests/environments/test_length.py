"""Length targets."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.environments import (
    Episode,
    Grade,
    Message,
    Task,
    TaskList,
    Tasks,
    Transcript,
    grade,
    load,
    task_of,
)
from peers.environments.length import PROMPT, LengthOptions, LengthTargets
from peers.environments.sort_digits import SortDigits
from swarm.errors import UserError

OPTIONS: dict[str, Any] = {"lengths": [8, 12], "alpha": 0.01, "prompt": "{length}:{prompt}"}
ENVIRONMENT, SAME = (load("sort-digits", "1", OPTIONS) for _ in range(2))


@given(st.binary(min_size=1, max_size=32))
def test_prompt_and_target_are_drawn_from_the_seed(seed: bytes) -> None:
    task, plain = task_of(ENVIRONMENT, seed), task_of(SortDigits(), seed)
    assert task == task_of(ENVIRONMENT, seed) == task_of(SAME, seed)
    assert task.target_length in (8, 12)
    assert task.prompt == f"{task.target_length}:{plain.prompt}"
    assert task.answer == plain.answer
    assert grade(ENVIRONMENT, task, Transcript.of(plain.answer)) == Grade(1.0)


def test_the_penalty_counts_every_token_off_the_target() -> None:
    task = task_of(ENVIRONMENT, b"a")
    assert task.length_penalty(task.target_length) == 0
    assert task.length_penalty(task.target_length + 5) == pytest.approx(0.05)
    assert task.length_penalty(task.target_length - 5) == pytest.approx(0.05)
    assert Task("p", "a").length_penalty(100) == 0


def test_published_values_are_the_defaults() -> None:
    task = task_of(load("sort-digits", "1", {"lengths": [2000]}), b"a")
    assert isinstance(task.prompt, str)
    assert task.length_weight == 0.0003
    assert task.prompt.endswith("> Think for 2000 tokens before giving a response.")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": 0.1}, "options: lengths is missing"),
        ({"lengths": [8], "depth": 3}, "unknown key 'depth'; there are: alpha, "),
        ({"lengths": "eight"}, "lengths is 'eight': Expected `array`"),
        ({"lengths": [0]}, "Expected `int` >= 1"),
        ({"lengths": []}, "of length >= 1"),
        ({"lengths": [8], "alpha": -1}, "alpha is -1: Expected `float` >= 0"),
        ({"lengths": [8], "alpha": math.nan}, "alpha is nan; it must be a finite number"),
        ({"lengths": [8], "prompt": "hello"}, "prompt is 'hello': Expected `str` matching"),
        ({"lengths": [8] * 65}, "of length <= 64"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        load("sort-digits", "1", options)


def test_the_last_of_several_messages_names_the_length() -> None:
    class Chat(SortDigits):
        def tasks(self) -> Tasks:
            return TaskList([Task((Message("system", "s"), Message("user", "{length}")), "")])

    options = LengthOptions(lengths=[5], prompt="{prompt} in {length}")
    asked = task_of(LengthTargets(Chat(), options), b"\1").prompt
    assert asked == (Message("system", "s"), Message("user", "{length} in 5"))


@pytest.mark.parametrize("prompt", [PROMPT, "{length}{prompt}"])
def test_an_environment_of_several_turns_grades_by_its_own_prompt(prompt: str) -> None:
    environment = load("calculator", "1", {"lengths": [8, 12], "prompt": prompt})
    task, plain = (task_of(each, bytes(32)) for each in (environment, load("calculator", "1")))
    assert isinstance(plain.prompt, str)
    call = plain.prompt.replace(">", "=")
    assert Episode(environment, task).step(call) == f"{plain.answer}>"
    transcript = Transcript.of(call, f"{plain.answer}>", plain.answer)
    assert grade(environment, task, transcript) == Grade(1.0)
