"""docs/alarms.md has the alarms that the program raises, by events that the program emits."""

from __future__ import annotations

from swarm.look.alarms.raising import CATALOGUE
from tests.docs.pages import ROOT, table, text


def test_the_table_is_the_catalogue() -> None:
    rows = {row[0].strip("`"): row[1:] for row in table(text("docs/alarms.md"))}
    assert rows == {name: [kind.severity, kind.when, kind.do] for name, kind in CATALOGUE.items()}


def test_each_event_of_the_catalogue_is_emitted() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for room in ("swarm", "peers")
        for path in (ROOT / room).rglob("*.py")
        if "look" not in path.parts
    ]
    named = {each for kind in CATALOGUE.values() for each in (*kind.events, *kind.over)}
    assert {each for each in named if not any(f'"{each}"' in text for text in sources)} == set()
