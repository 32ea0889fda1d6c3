"""The tables of models in `docs/engines.md`: `python -m tests.docs.models_table` writes them."""

from __future__ import annotations

import re

from peers.engines.architecture import FAMILIES
from tests.docs.pages import ROOT
from tests.engines.test_general import FAMILIES as GENERAL
from tests.engines.test_general import MORE
from tests.trainer.test_general_families import PADDED

PAGE = ROOT / "docs" / "engines.md"
TABLE = re.compile(r"(?<=\n)\| Family \| `model_type` \|.*\n(?:\|.*\n)+")
GENERAL_TABLE = re.compile(r"(?<=\n)\| Trainer's rows \| `model_type` \|.*\n(?:\|.*\n)+")


def table() -> str:
    """The table, made from the families."""
    rows = ["| Family | `model_type` | Beyond Llama |", "|---|---|---|"]
    for name, family in FAMILIES.items():
        rows.append(f"| {family.title} | `{name}` | {family.notes} |")
    return "\n".join(rows) + "\n"


def general_table() -> str:
    """The table of the families that are tested in transformers' own module."""
    names = sorted({**GENERAL, **MORE}.keys() - FAMILIES.keys())
    rows = ["| Trainer's rows | `model_type` |", "|---|---|"]
    for rows_are, chosen in (
        ("packed", [name for name in names if name not in PADDED]),
        ("padded", [name for name in names if name in PADDED]),
    ):
        rows.append(f"| {rows_are} | {', '.join(f'`{name}`' for name in chosen)} |")
    return "\n".join(rows) + "\n"


def shown(pattern: re.Pattern[str]) -> str:
    """A table on the page."""
    match = pattern.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None, "docs/engines.md has no table of models"
    return match[0]


TABLES = {TABLE: table, GENERAL_TABLE: general_table}
"""What makes the table that each pattern finds."""

if __name__ == "__main__":
    for pattern, make in TABLES.items():
        text = PAGE.read_text(encoding="utf-8").replace(shown(pattern), make())
        PAGE.write_text(text, encoding="utf-8")
