"""`docs/answers.md`: `python -m tests.docs.answers_page` writes it from the table of the tests."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

from tests.docs.pages import ROOT
from tests.environments.test_math_forms import ROWS, Row

PAGE = ROOT / "docs" / "answers.md"
HEAD = (
    "# Answers of mathematics\n\n"
    "Which answers the grader [`math`](environments.md#graders) takes for a gold, beside "
    "math-verify 0.9.0 by itself and a person. Answers stand in a box. All were made for this "
    "page; `tests/environments/test_math_forms.py` checks every verdict. Of each kind a table has "
    "the answers on which all three agree, and a further one those on which they do not, with the "
    'three verdicts and the reason ("it" is math-verify).\n'
)


def code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def agreed(rows: list[Row]) -> str:
    """The answers that all three judge alike, by their gold."""
    golds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        golds[row.gold][row.right].append(code(row.answer))
    text = "\n| Gold | Right | Wrong |\n|---|---|---|\n"
    for gold, answers in golds.items():
        cells = code(gold), ", ".join(answers["right"]), ", ".join(answers["wrong"])
        text += f"| {' | '.join(cells)} |\n"
    return text


def apart(rows: list[Row]) -> str:
    """The others, by verdicts and reason."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for row in rows:
        groups[row[3:]].append(f"{code(row.gold)}: {code(row.answer)}")
    text = "\n| A person | Grader | math-verify | Why | Gold: answer |\n|---|---|---|---|---|\n"
    for verdicts, answers in groups.items():
        text += f"| {' | '.join(verdicts)} | {'; '.join(answers)} |\n"
    return text


def page() -> str:
    differ = [row for row in ROWS if row.swarm != row.math_verify]
    missed = [row for row in ROWS if row.right != row.swarm]
    text = (
        f"{HEAD}\n{len(ROWS)} answers: on {len(differ)} the grader and math-verify differ; on "
        f"{len(missed)} the grader does not say what a person would, and no wrong answer earns.\n"
    )
    for kind, found in groupby(sorted(ROWS, key=lambda row: row.kind), lambda row: row.kind):
        text += f"\n## {kind.capitalize()}\n"
        rows = list(found)
        alike = [row for row in rows if row.right == row.swarm == row.math_verify]
        if alike:
            text += agreed(alike)
        if others := [row for row in rows if row not in alike]:
            text += apart(others)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
