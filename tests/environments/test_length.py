"""Length targets and curricula."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.environments import Task, load, task_of_step
from peers.environments.base import Split, answer_of, grade
from peers.environments.length import PROMPT, LengthOptions, LengthTargets
from peers.environments.sort_digits import SortDigits
from swarm.errors import UserError

OPTIONS: dict[str, Any] = {"lengths": [8, 12], "alpha": 0.01, "prompt": "{length}:{prompt}"}
ENVIRONMENT, SAME = (load("sort-digits", "1", OPTIONS) for _ in range(2))


@given(st.binary(min_size=1, max_size=32))
def test_prompt_and_target_are_drawn_from_the_seed(seed: bytes) -> None:
    task, plain = ENVIRONMENT.task(seed), SortDigits().task(seed)
    assert task == ENVIRONMENT.task(seed) == SAME.task(seed)
    assert task.target_length in (8, 12)
    assert task.prompt == f"{task.target_length}:{plain.prompt}"
    assert task.answer == plain.answer
    assert ENVIRONMENT.reward(task, plain.answer, True) == 1.0


def test_every_target_is_drawn_about_as_often() -> None:
    environment = load("sort-digits", "1", {"lengths": [1, 2, 3, 4]})
    counts = [0] * 5
    for number in range(800):
        counts[environment.task(number.to_bytes(4, "big")).target_length] += 1
    assert counts[0] == 0
    assert all(150 < count < 250 for count in counts[1:])


def test_the_penalty_counts_every_token_off_the_target() -> None:
    task = ENVIRONMENT.task(b"a")
    assert task.length_penalty(task.target_length) == 0
    assert task.length_penalty(task.target_length + 5) == pytest.approx(0.05)
    assert task.length_penalty(task.target_length - 5) == pytest.approx(0.05)
    assert Task("p", "a").length_penalty(100) == 0


def test_published_values_are_the_defaults() -> None:
    task = load("sort-digits", "1", {"lengths": [2000]}).task(b"a")
    assert task.length_weight == 0.0003
    assert task.prompt.endswith("> Think for 2000 tokens before giving a response.")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": 0.1}, "options: lengths is missing"),
        ({"lengths": [8], "depth": 3}, "unknown key 'depth'; there are: alpha, lengths, prompt"),
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


class Growing(SortDigits):
    """A curriculum: the prompt says how hard it is."""

    def task_at(self, seed: bytes, step: int, split: Split = "train") -> Task:
        return Task(prompt=f"{step} {seed.hex()}>", answer=str(step))


def test_a_curriculum_is_asked_with_the_step() -> None:
    assert task_of_step(Growing(), b"\1", 7) == Task("7 01>", "7")
    assert task_of_step(SortDigits(), b"\1", 7) == SortDigits().task(b"\1")
    timed = LengthTargets(Growing(), LengthOptions(lengths=[5], alpha=0.5))
    assert task_of_step(timed, b"\1", 7).prompt == PROMPT.replace("{prompt}", "7 01>").replace(
        "{length}", "5"
    )


@pytest.mark.parametrize("prompt", [PROMPT, "{length}{prompt}"])
def test_an_environment_of_several_turns_grades_by_its_own_prompt(prompt: str) -> None:
    environment = load("calculator", "1", {"lengths": [8, 12], "prompt": prompt})
    task, plain = environment.task(bytes(32)), load("calculator", "1").task(bytes(32))
    call = plain.prompt.replace(">", "=")
    assert answer_of(environment, task, [call]) == f"{plain.answer}>"
    assert grade(environment, task, [call, f"{plain.answer}>", plain.answer], True) == 1.0
