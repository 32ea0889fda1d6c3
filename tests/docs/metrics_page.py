"""The tables of `docs/metrics.md`, made from the figures: `python -m tests.docs.metrics_page`."""

from __future__ import annotations

from swarm.look.metrics.figures import Figures
from swarm.transport import Traffic
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "metrics.md"
BEGIN = "<!-- The tables are made by python -m tests.docs.metrics_page. -->\n"

ROLES = {
    "observer": "Of every peer",
    "inference": "Of inference peers",
    "validator": "Of validators",
    "trainer": "Of the trainer",
    "replica": "Of replicas",
}
"""Roles with figures of their own, after one without, and the headings of their tables."""

Row = tuple[str, str, str, str]
"""Name, type, labels, meaning."""


def watched(*roles: str) -> Figures:
    """The figures of a peer that has moved nothing."""
    figures = Figures(roles)
    figures.watch(Traffic(), ready=lambda: True, peers=lambda: 0)
    return figures


def rows(role: str) -> list[Row]:
    """Every figure of a peer with one role, in the order in which it is served."""
    found = []
    figures = watched(role)
    for each in figures.registry.collect():
        name = f"{each.name}_total" if each.type == "counter" else each.name
        found.append((name, each.type, ", ".join(figures.labels.get(name, ())), each.documentation))
    return found


def tables() -> str:
    """The page's part with the tables."""
    parts = [BEGIN]
    common = set(rows("observer"))
    for role, heading in ROLES.items():
        own = [row for row in rows(role) if role == "observer" or row not in common]
        lines = [f"| {' | '.join((f'`{row[0]}`', *row[1:]))} |" for row in own]
        parts.append(f"### {heading}\n")
        parts.append(
            "\n".join(["| Name | Type | Labels | Meaning |", "|---|---|---|---|", *lines]) + "\n"
        )
    return "\n".join(parts) + "\n" + BEGIN


def page() -> str:
    """The whole page, with its tables as they should be."""
    before, _, after = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + tables() + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
