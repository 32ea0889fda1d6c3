"""The README's badges claim what the repository shows."""

from __future__ import annotations

import importlib.util
import re

from tests.docs.pages import ROOT, text


def test_the_badges_tell_the_truth() -> None:
    spec = importlib.util.spec_from_file_location("badges", ROOT / "tools" / "badges.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    shown = text("docs/badges.svg")
    claimed = re.search(r"tests: ([\d,]+)\+", shown)
    assert claimed is not None
    there, at_least = tool.tests(), int(claimed[1].replace(",", ""))
    assert at_least <= there < at_least + 1_000, "run python tools/badges.py"
    assert shown == tool.drawn(tool.badges(at_least)), "run python tools/badges.py"
    assert "](docs/badges.svg)" in text("README.md")
