"""`docs/answers.md`: `python -m tests.docs.answers_page` writes it from the table of the tests."""

from __future__ import annotations

from itertools import groupby

from tests.docs.pages import ROOT
from tests.environments.test_math_forms import ROWS

PAGE = ROOT / "docs" / "answers.md"
HEAD = (
    "# Answers of mathematics\n\n"
    "Golds and answers with the verdicts of the grader [`math`](environments.md#graders), and of "
    "math-verify 0.9.0 by itself on the same two texts. Answers stand in a box. All of them were "
    "made for this table; `tests/environments/test_math_forms.py` checks every verdict. Where a "
    'person, the grader and math-verify do not say the same, the last column says why ("it" is '
    "math-verify).\n"
)


def page() -> str:
    differ = [row for row in ROWS if row.swarm != row.math_verify]
    missed = [row for row in ROWS if row.right != row.swarm]
    text = (
        f"{HEAD}\n{len(ROWS)} rows: on {len(differ)} the grader and math-verify differ; on "
        f"{len(missed)} the grader does not say what a person would, and no wrong answer earns.\n"
    )
    for kind, rows in groupby(sorted(ROWS, key=lambda row: row.kind), lambda row: row.kind):
        text += f"\n## {kind.capitalize()}\n\n"
        text += "| Gold | Answer | A person | Grader | math-verify | Why they differ |\n"
        text += "|---|---|---|---|---|---|\n"
        for row in rows:
            golds = (f"`{each}`".replace("|", "\\|") for each in (row.gold, row.answer))
            text += f"| {' | '.join((*golds, *row[3:]))} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
