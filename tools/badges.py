"""Draw docs/badges.svg, the README's badges, from what the repository says of itself.

    python tools/badges.py

Nothing is fetched, and nothing is claimed that the files do not show: `tests/docs/test_badges.py`
compares the picture with them.
"""

from __future__ import annotations

import ast
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "badges.svg"
HEIGHT, PADDING, GAP = 20, 6, 6
LETTER = 6.6
"""Width of a letter in the font's size of 11, roughly; `textLength` makes it exact."""


def tests() -> int:
    """Functions that pytest collects from tests/."""
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def badges(test_functions: int) -> list[tuple[str, str]]:
    """Each badge's label and value."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    types = "mypy strict" if project["tool"]["mypy"]["strict"] else "mypy"
    return [
        ("tests", f"{test_functions // 500 * 500:,}+"),
        ("types", types),
        ("licence", project["project"]["license"]),
        ("python", project["project"]["requires-python"].replace(">=", "") + "+"),
    ]


def drawn(rows: list[tuple[str, str]]) -> str:
    """The picture: labels on grey, values on blue."""
    parts, x = [], 0.0
    for label, value in rows:
        for text, colour in ((label, "#555"), (value, "#0969da")):
            length = LETTER * len(text)
            width = length + 2 * PADDING
            parts.append(
                f'<rect x="{x:.1f}" width="{width:.1f}" height="{HEIGHT}" fill="{colour}"/>'
                f'<text x="{x + PADDING:.1f}" y="14" textLength="{length:.1f}">'
                f"{escape(text)}</text>"
            )
            x += width
        x += GAP
    width = f"{x - GAP:.0f}"
    title = escape(", ".join(f"{label}: {value}" for label, value in rows))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'viewBox="0 0 {width} {HEIGHT}" font-family="Verdana,Geneva,sans-serif" font-size="11" '
        f'fill="#fff"><title>{title}</title>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn(badges(tests())), encoding="utf-8")
