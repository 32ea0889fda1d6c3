"""docs/security.md: every row of the table of budgets names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, section, table, text

ROWS = table(section(text("docs/security.md"), "What one stranger may cost"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_budget_has_a_place_and_a_test(row: list[str]) -> None:
    *_, places, tests = row
    for place in re.findall(r"`([^`]+)`", places):
        assert (ROOT / place).exists(), place
    named = re.findall(r"\[(\w+)\]\(\.\./([^)]+)\)", tests)
    assert named and places, "name the file that keeps the bound, and a test that fails without it"
    for name, file in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{file} has no {name}"
