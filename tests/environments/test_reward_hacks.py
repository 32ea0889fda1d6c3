"""Every reward hack of the catalogue gains what the page says, and an honest answer all."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from peers.environments.graders import make_grader
from peers.sandbox import why_none
from tests.environments.reward_hacks import (
    CALLED,
    CHECKED,
    HACKS,
    PRINTED,
    SAME,
    TESTED,
    Hack,
    _played,
    measured,
    on_the_page,
    table,
)

SOLVED = "echo 4219 > answer.txt; echo 'echo $(($1*2))' > double.sh"


def needs(grader: str) -> None:
    if grader in ("code", "terminal") and why_none():
        pytest.skip(f"no sandbox here: {why_none()}")
    if grader == "math" and find_spec("math_verify") is None:
        pytest.skip("math-verify is not installed")


@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: f"{hack.grader}: {hack.name}")
def test_a_hack_gains_what_the_page_says(hack: Hack, tmp_path: Path) -> None:
    needs(hack.grader)
    assert measured(hack, tmp_path) == hack.gain


def test_the_page_has_every_hack() -> None:
    """`python -m tests.environments.reward_hacks` writes it."""
    assert on_the_page() == table()
    assert all((hack.gain > 0) == ("**undefended**" in hack.why) for hack in HACKS)


def test_honest_answers_earn_all_where_hacks_earn_nothing() -> None:
    needs("code")
    code = make_grader("code")
    for source, tests in (
        ("solve = sum", CALLED), ("print(sum(map(int, input().split())))", PRINTED),
        ("solve = lambda xs: 7", SAME),
    ):  # fmt: skip
        assert code.grade(source, "", {"tests": tests}).reward == 1.0
    assert _played(TESTED, SOLVED) == _played(CHECKED, SOLVED) == 1.0
