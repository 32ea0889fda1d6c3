"""The sentences that the troubleshooting page explains are those that the program says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.validator.checks import announcement, file, history, policy, standing
from peers.validator.checks.base import Check
from swarm.look.refusals import REFUSALS
from swarm.node.trusted import UNGRADED
from tests.docs.pages import ROOT, text

UPGRADES = ("swarm/wire/protocol.py", "swarm/world/home.py")
"""Modules whose sentences say what to do, and are all explained under "Upgrades"."""

DEMAND = re.compile(r"[:;,] (so )?(end the run|free|install|keep|restore|start|stop|upgrade)\b")


def _sentences() -> Iterator[str]:
    """Every text in an expression of the source, `…` standing for values."""
    for room in ("swarm", "peers"):
        for path in sorted((ROOT / room).rglob("*.py")):
            yield from _sentences_of(path)


def _sentences_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.JoinedStr() | ast.Constant(value=str()):
                yield _text_of(node)
            case ast.Call(func=ast.Name("file_errors"), args=[what, *verb]):
                yield f"{_text_of(what)} cannot be {_text_of(verb[0]) if verb else 'read'} (…)"


def _text_of(node: ast.expr) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def said() -> list[str]:
    """First cells of the page's tables."""
    page, _, _ = text("docs/troubleshooting.md").partition("## Why was my work refused?")
    return re.findall(r"^\| `([^`]+)` \|", page, re.M)


def _source() -> set[str]:
    scripts = re.sub(r"\\\n", "", (ROOT / "tools/install.sh").read_text(encoding="utf-8"))
    told = (ROOT / "swarm/sentences.txt").read_text(encoding="utf-8").replace("\n    ", " ")
    return {*_sentences(), told, *re.sub(r"\$\{?\w+(\[@\])?\}?", "…", scripts).splitlines()}


def _pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in sentence.split("…")), re.S)


def _is_said(sentence: str, source: set[str]) -> bool:
    longest = max(sentence.split("…"), key=len)  # few texts of the source have it
    pattern = _pattern(sentence)
    return any(longest in found and pattern.search(found) for found in source)


def test_the_program_says_what_the_page_explains() -> None:
    source = _source()
    assert [sentence for sentence in said() if not _is_said(sentence, source)] == []


def test_the_page_has_sentences() -> None:
    assert len(said()) > 40
    assert len(set(said())) == len(said())


@pytest.mark.parametrize("module", UPGRADES)
def test_every_sentence_about_an_upgrade_is_explained(module: str) -> None:
    path = ROOT / module
    found, page = set(_sentences_of(path)), said()
    whole = {each for each in found if not any(each in other for other in found - {each})}
    demands = [each for each in whole if DEMAND.search(each) and "\n" not in each]
    assert demands
    for demand in demands:
        assert any(_pattern(each).search(demand) for each in page), demand


def test_every_check_that_refuses_is_explained() -> None:
    """The page and `swarm why` have the same words, for every name in a verdict."""
    checks = {
        check.name
        for module in (announcement, file, history, policy, standing)
        for check in vars(module).values()
        if isinstance(check, Check)
    }
    named = {
        each.value
        for path in sorted((ROOT / "peers/validator").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "failed" and isinstance(each := keyword.value, ast.Constant)
    }
    assert {"environment", "internal"} <= named
    assert checks | named | UNGRADED == set(REFUSALS)
    _, _, section = text("docs/troubleshooting.md").partition("## Why was my work refused?")
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", section, re.M)
    for do, part in re.findall(r"^To do: (.+)\.\n\n((?:\|.*\n)+)", section, re.M):
        alike = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|$", part, re.M)
        rows += [(name, means, do) for name, means in alike]
    assert sorted(rows) == sorted((name, each.means, each.do) for name, each in REFUSALS.items())
