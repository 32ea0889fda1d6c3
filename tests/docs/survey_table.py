"""The table of packages in `docs/verifiers.md`: `python -m tests.docs.survey_table FILE` writes it.

FILE has the results of `swarm environment survey`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from peers.environments.verifiers.survey import Surveyed
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "verifiers.md"
TABLE = re.compile(r"(?<=\n)\| Package \| Module \|.*\n(?:\|.*\n)+")


def row(each: Surveyed) -> str:
    """A package, or one of its modules, as a row in Markdown."""
    name = re.split(r"[=<>\[ ]", each.package)[0]
    module = f"`{each.module}`" if each.module else ""
    pinned = f" (asks for {each.pinned})" if each.pinned not in ("", "any") else ""
    cells = f"`{name}` {each.version}".strip(), module, each.library + pinned, each.result
    return f"| {' | '.join(cell.strip().replace('|', '/') for cell in cells)} |"


def table(file: Path) -> str:
    """The table of a file of results."""
    found = msgspec.json.Decoder(Surveyed).decode_lines(file.read_bytes())
    rows = ["| Package | Module | verifiers | Result |", "|---|---|---|---|", *map(row, found)]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    assert TABLE.search(text), "docs/verifiers.md has no table of packages"
    PAGE.write_text(TABLE.sub(lambda _: table(Path(sys.argv[1])), text), encoding="utf-8")
