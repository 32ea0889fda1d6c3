r"""The grader `math`: right and wrong answers beside math-verify's own word where it differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.environments import NotGradable, Transcript, grade
from peers.environments.dataset import Dataset, DatasetOptions
from peers.environments.graders import make_grader
from peers.environments.graders.answers import by_text, readable
from peers.environments.graders.math import CPU_SECONDS
from tests.environments.slow_answers import measure

MATH = make_grader("math")


def reward(gold: str, text: str) -> float:
    return MATH.grade(f"So it is $\\boxed{{{text}}}$.", gold, {}).reward


def verified(gold: str, text: str) -> bool:
    """What math-verify says by itself."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(content: str) -> Any:
        extraction = (LatexExtractionConfig(boxed_match_priority=0),)
        boxed = f"\\boxed{{{content}}}"
        return parse(boxed, extraction, fallback_mode="no_fallback", parsing_timeout=None)

    return bool(verify(read(gold), read(text), timeout_seconds=None))


TABLE = Path(__file__).with_name("answers.tsv")
"""Golds and answers that we made: what is right, and what this grader and math-verify say."""


class Row(NamedTuple):
    kind: str
    gold: str
    answer: str
    right: str
    """What a person says."""
    swarm: str
    math_verify: str
    reason: str
    """Why they differ."""


ROWS = [Row(*line.split("\t")) for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]


def verdict(row: Row) -> str:
    try:
        MATH.check(row.gold, {})
        return "right" if reward(row.gold, row.answer) else "wrong"
    except NotGradable:
        return "not gradable"


@pytest.mark.parametrize("kind", sorted({row.kind for row in ROWS}))
def test_verdicts_of_the_table(kind: str) -> None:
    for row in (row for row in ROWS if row.kind == kind):
        assert verdict(row) == row.swarm, row
        assert ("right" if verified(row.gold, row.answer) else "wrong") == row.math_verify, row
        assert bool(row.reason) is (len({row.right, row.swarm, row.math_verify}) > 1), row
        assert row.swarm == "right" or row.right != "right" or row.math_verify == "wrong", row
        decided = by_text(readable(row.gold), readable(row.gold)) is not None
        assert decided or row.swarm == "not gradable" or reward(row.gold, row.gold) == 1, row


def test_the_table_is_large_and_wrong_answers_never_earn() -> None:
    assert len(ROWS) >= 200 and len({(row.gold, row.answer) for row in ROWS}) == len(ROWS)
    assert not [row for row in ROWS if row.right == "wrong" and row.swarm == "right"]
    assert sum(row.right != row.swarm for row in ROWS) <= 12


@settings(max_examples=40, deadline=None)
@given(
    st.integers(-(10**12), 10**12), st.integers(1, 10**6), st.integers(-(10**12), 10**12)
)  # fmt: skip
def test_a_number_is_equal_in_every_writing_and_to_no_other(n: int, d: int, other: int) -> None:
    for gold, texts in (
        (f"{n}", [f"{n}", f"{n:,}", f"\\text{{{n}}}", f"{n}.", f"{n}.0", f"{{{n}}}", f"\\${n}"]),
        (f"\\frac{{{n}}}{{{d}}}", [f"{n}/{d}", f"\\dfrac{{{n}}}{{{d}}}"]),
        (f"{n}\\times 10^{{-{d % 40}}}", [f"{n}e-{d % 40}"]),
        (f"{d + 1}^{{{abs(n) % 5000}}}", [f"{d + 1}^{{{abs(n) % 5000}}}"]),
    ):
        assert all(reward(gold, text) == 1 for text in texts), gold
    if other != n:
        assert reward(f"{n}", f"{other}") == 0
        assert reward(f"\\frac{{{n}}}{{{d}}}", f"\\frac{{{other}}}{{{d}}}") == 0
        assert reward(f"{n}\\times10^{{-30}}", f"{other}\\times10^{{-30}}") == 0


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_is_read(gold: str, text: str) -> None:
    by_text(readable(gold), readable(text))


PROBLEMS = """{"problem": "Half of one?", "solution": "\\\\frac{1}{2}"}
{"problem": "Solve x^2=4.", "solution": "\\\\{-2, 2\\\\}"}
"""


def test_problems_of_a_file(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(PROBLEMS, encoding="utf-8")
    options = DatasetOptions(
        path=str(path),
        columns=['prompt="{problem} Put the final answer in a box."', 'answer="solution"'],
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
    """One of these took 7 s. Of 2,500, ten seeds of 250, the slowest took 2.05 s."""
    slowest, outcomes = measure(12, seed=1)
    assert slowest < CPU_SECONDS + 0.5
    assert "overdue" in outcomes, "none of them was slow"
    assert "rewarded" not in outcomes
