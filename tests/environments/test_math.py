"""The environment `math`: its generated problems, and their answers."""

from __future__ import annotations

import pytest

from benchmarks.slow_answers import measure
from peers.environments import Transcript, grade, load, split_of, task_of
from peers.environments.dataset import Dataset, DatasetOptions
from peers.environments.graders.math import CPU_SECONDS
from swarm.errors import UserError


def drawn(environment, number: int, split="train"):
    return task_of(environment, number.to_bytes(32, "big"), split)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_answer_of_a_problem_is_right_and_anothers_is_wrong(level):
    environment = load("math", "1", {"level": level})
    for number in range(6):
        task = drawn(environment, number)
        assert task == drawn(environment, number) and split_of(task.prompt) == "train"
        right = Transcript.of(f"Thus {task.answer}.")
        assert grade(environment, task, right).reward == 1
        wrong = Transcript.of(drawn(environment, 99).answer)
        assert grade(environment, task, wrong).reward == 0
    assert grade(environment, task, Transcript.of(task.answer, finished=False)).parts == {
        "unfinished": 1.0
    }


def test_the_problem_stands_in_the_template():
    environment = load("math", "1", {"instruction": "Q: {problem}\nA: \\boxed{?}"})
    assert drawn(environment, 1).prompt.startswith("Q: Compute ")
    assert drawn(environment, 1).prompt.endswith("A: \\boxed{?}")


@pytest.mark.parametrize(
    ("options", "says"),
    [({"level": 4}, "level is 4"), ({"instruction": "no problem"}, "instruction is 'no problem'")],
)
def test_a_wrong_option_is_refused(options, says):
    with pytest.raises(UserError, match=f"'math': options: {says}"):
        load("math", "1", options)


PROBLEMS = """{"problem": "Half of one?", "solution": "\\\\frac{1}{2}"}
{"problem": "Solve x^2=4.", "solution": "\\\\{-2, 2\\\\}"}
"""


def test_problems_of_a_file(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(PROBLEMS, encoding="utf-8")
    options = DatasetOptions(
        path=str(path),
        prompt_template="{problem} Put the final answer in a box.",
        answer_column="solution",
        grader="math",
    )
    environment = Dataset(options)
    for number in range(2):
        task = environment.task_of_row(number)
        text = ("0.5", r"\{2, -2\}")[number]
        right = Transcript.of(f"So \\boxed{{{text}}}.")
        assert grade(environment, task, right).reward == 1
        assert grade(environment, task, Transcript.of(task.answer)).reward == 1
        assert grade(environment, task, Transcript.of("\\boxed{7}")).reward == 0


@pytest.mark.slow  # each answer is made to take as long as it may
def test_an_answer_made_to_be_slow_takes_two_seconds_of_cpu_time_at_most() -> None:
    """One of these took 7 s. `python -m benchmarks.slow_answers` measures 10,000."""
    found = measure(12, seed=1)
    assert found["cpu_seconds_max"] < CPU_SECONDS + 0.5
    outcomes = {outcome for kind in found["reasons"].values() for outcome in kind}
    assert "overdue" in outcomes, "none of them was slow"
    assert "rewarded" not in outcomes
