"""The sentences that the troubleshooting page explains are those that the program says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT, text


def _sentences() -> Iterator[str]:
    """Every text in an expression of the source, `…` standing for values."""
    for room in ("swarm", "peers"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def said() -> list[str]:
    """First cells of the page's tables."""
    return re.findall(r"^\| `([^`]+)` \|", text("docs/troubleshooting.md"), re.M)


def _pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in sentence.split("…")), re.S)


@pytest.fixture(scope="module")
def source() -> list[str]:
    scripts = re.sub(r"\\\n", "", (ROOT / "tools/install.sh").read_text(encoding="utf-8"))
    return [*_sentences(), *re.sub(r"\$\{?\w+(\[@\])?\}?", "…", scripts).splitlines()]


@pytest.mark.parametrize("sentence", said())
def test_the_program_says_it(sentence: str, source: list[str]) -> None:
    pattern = _pattern(sentence)
    assert any(pattern.search(found) for found in source), sentence


def test_the_page_has_sentences() -> None:
    assert len(said()) > 40
    assert len(set(said())) == len(said())
