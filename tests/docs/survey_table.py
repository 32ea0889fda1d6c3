"""The table of packages in `docs/verifiers.md`: `python -m tests.docs.survey_table FILE` writes it.

FILE has the results of `swarm environment survey`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from peers.environments.verifiers.survey import Surveyed
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "verifiers.md"
TABLE = re.compile(r"(?<=\n)\| Package \| Module \|.*\n(?:\|.*\n)+")


def rows(found: Iterable[Surveyed]) -> list[str]:
    """A row in Markdown for each result of a package, and one for all packages that have the same
    result and no module that is an environment. What works comes first."""
    together: dict[tuple[str, str, str], tuple[list[str], list[str]]] = {}
    for each in sorted(found, key=lambda each: each.verdict != "works"):
        bare = re.split(r"[=<>\[ ]", each.package)[0]
        name = f"`{bare}` {each.version}".strip()
        pinned = f" (asks for {each.pinned})" if each.pinned not in ("", "any") else ""
        alike = (name, each.library + pinned) if each.module else ("", "")
        names, modules = together.setdefault((*alike, each.result), ([], []))
        names += [name] * (name not in names)
        modules += [f"`{each.module}`"] * bool(each.module)
    parts = (
        (", ".join(names), ", ".join(modules), library, result)
        for (_, library, result), (names, modules) in together.items()
    )
    return [f"| {' | '.join(cell.strip().replace('|', '/') for cell in row)} |" for row in parts]


def table(file: Path) -> str:
    """The table of a file of results."""
    found = msgspec.json.Decoder(Surveyed).decode_lines(file.read_bytes())
    lines = ["| Package | Module | verifiers | Result |", "|---|---|---|---|", *rows(found)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    assert TABLE.search(text), "docs/verifiers.md has no table of packages"
    PAGE.write_text(TABLE.sub(lambda _: table(Path(sys.argv[1])), text), encoding="utf-8")
