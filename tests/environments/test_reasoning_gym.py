"""The environment and the grader `reasoning-gym`, with the package's own data sets."""

from __future__ import annotations

from typing import Any

import pytest

from peers.environments import NotGradable, Transcript, grade, load, split_of, task_of
from peers.environments.graders import make_grader
from peers.environments.graders.reasoning_refused import REFUSED
from swarm.errors import UserError

EASY: dict[str, Any] = {"datasets": ["chain_sum"], "settings": ["chain_sum.max_digits=1"]}


def drawn(environment, number: int, split="train"):
    return task_of(environment, number.to_bytes(32, "big"), split)


def test_tasks_of_a_seed_are_equal_and_of_their_split():
    environment = load("reasoning-gym", "1", EASY)
    for split in ("train", "held_out"):
        for number in range(5):
            task = drawn(environment, number, split)
            assert task == drawn(load("reasoning-gym", "1", EASY), number, split)
            assert split_of(task.prompt) == split


def test_the_answer_earns_the_reward_tagged_or_not():
    environment = load("reasoning-gym", "1", EASY)
    task = drawn(environment, 0)
    for text in (task.answer, f" {task.answer}\n", f"1+1 is <answer>{task.answer}</answer>."):
        assert grade(environment, task, Transcript.of(text)).reward == 1
    for text in (f"{task.answer}0", "", "so", f"<answer>7</answer> {task.answer}"):
        assert grade(environment, task, Transcript.of(text)).reward == 0
    unfinished = Transcript.of(task.answer, finished=False)
    assert grade(environment, task, unfinished).parts == {"unfinished": 1.0}


def test_the_prompt_may_leave_out_what_every_question_says():
    options = {**EASY, "after": "problem: ", "instruction": "{question}"}
    prompt = str(drawn(load("reasoning-gym", "1", options), 0).prompt)
    assert prompt.endswith(" =") and "State" not in prompt
    options["after"] = "absent"
    assert "State" in str(drawn(load("reasoning-gym", "1", options), 0).prompt)


def test_a_mixture_draws_from_all():
    environment = load("reasoning-gym", "1", {"datasets": ["gcd", "lcm"]})
    names = [drawn(environment, number).data["dataset"] for number in range(60)]
    assert 20 <= names.count("gcd") <= 40


def test_a_part_of_the_score_counts_only_where_the_options_say_so():
    for partial, reward in ((False, 0.0), (True, 0.01)):
        options: dict[str, Any] = {"datasets": ["countdown"], "partial": partial}
        environment = load("reasoning-gym", "1", options)
        task = drawn(environment, 0)
        assert grade(environment, task, Transcript.of("1+1")).reward in (reward, 5 * reward)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"datasets": ["chainsum"]}, "'chainsum' cannot draw a task .*chainsum"),
        ({"datasets": ["composite"]}, "'composite', which is refused: a mixture is made by naming"),
        ({"datasets": []}, "datasets is"),
        ({"settings": ["chain_sum.terms=1"]}, "'chain_sum' cannot draw a task .*'terms'"),
        ({"settings": ["chain_sum.max_terms=two"]}, "settings holds 'chain_sum.max_terms=two'"),
        ({"settings": ["gcd.x=1"]}, "gcd is not among the datasets"),
        ({"settings": ["chain_sum"]}, "it must be DATASET.SETTING=VALUE"),
        ({"settings": ["chain_sum.min_terms=9"]}, "'chain_sum' cannot draw a task"),
        ({"instruction": "?"}, "instruction is '\\?'"),
    ],
)
def test_a_wrong_option_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        drawn(load("reasoning-gym", "1", options), 0)


def test_the_refused_data_sets_are_refused_by_name():
    for name, reason in REFUSED.items():
        with pytest.raises(UserError, match=f"{name}.* is refused"):
            load("reasoning-gym", "1", {"datasets": [name]})
        assert reason


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("countdown", "__import__('os').abort()"),
        ("countdown", "9**9**9**9"),
        ("simple_integration", "x**9**9**9"),
        ("simple_integration", "((x**99)**99)**99+(x**99)**99"),
        ("polynomial_multiplication", "S('exit()')"),
        ("n_queens", "exit()"),
        ("spiral_matrix", "[0]*10**10"),
        ("chain_sum", "9" * 30_000),
    ],
)
def test_no_answer_is_run_as_a_program(name, text):
    environment = load("reasoning-gym", "1", {"datasets": [name]})
    task = drawn(environment, 0)
    given = grade(environment, task, Transcript.of(text))
    assert given.reward == 0 and list(given.parts) in (["unreadable"], ["too long"])


def test_entries_that_the_package_wrote_elsewhere():
    grader = make_grader("reasoning-gym")
    data = {"metadata": '{"source_dataset": "chain_sum", "source_index": 0}'}
    assert grader.grade("5", "5", data).reward == 1
    assert grader.grade("6", "5", data).reward == 0
    with pytest.raises(NotGradable, match="no metadata with source_dataset"):
        grader.grade("5", "5", {})
