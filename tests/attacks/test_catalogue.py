"""The catalogue is complete: every attack has its row, and every adversary its attack."""

from __future__ import annotations

import re

from simnet.adversaries import KINDS
from tests.attacks.catalogue import ELSEWHERE, GROUPS, HERE, attacks, on_the_page, table
from tests.attacks.drawing import Draws
from tests.attacks.models import Arena


def test_the_page_has_every_attack() -> None:
    """`python -m tests.attacks.catalogue` writes it."""
    assert on_the_page() == table()
    assert {attack.group for attack in attacks()} == set(GROUPS)


def test_attacks_tested_elsewhere_are_there() -> None:
    for attack in ELSEWHERE:
        text = (HERE.parent.parent / attack.path).read_text(encoding="utf-8")
        assert attack.path.endswith("test_fuzz.py") or re.search(
            rf"def test_\w*{attack.name}", text
        ), attack


def test_every_adversary_of_the_simulator_is_in_the_catalogue() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("**/test_*.py"))
    simulated = set(
        re.findall(r'\b(?:caught|harmless|caught_beside|Setting)\(\s*"([\w-]+)"', sources)
    )
    assert simulated == set(KINDS)


def test_a_cheat_who_draws_honestly_is_accepted(arena: Arena) -> None:
    """So the attacks on text are caught by what they change."""
    cheat = Draws(arena.engine, lambda drawing: drawing.honest().argmax(-1))
    assert arena.meets(cheat).refused == 0
