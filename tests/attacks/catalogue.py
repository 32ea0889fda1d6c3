"""The catalogue: every file of this folder is one attack, and its docstring is its row.

A docstring has three paragraphs: the attack; its outcome, which begins with *Caught*, *Harmless* or
*Undefended*; and *Cost:*, what it costs the swarm and the attacker.

    python -m tests.attacks.catalogue      # write the table to docs/security.md
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "security.md"
BEGIN, END = "<!-- catalogue -->", "<!-- end of catalogue -->"
OUTCOMES = ("Caught", "Harmless", "Undefended")
GROUPS = {
    "text": "Text, tokens and weights",
    "submissions": "Files, numbers and records",
    "identities": "Identities",
    "validators": "Validators and trusted peers",
    "network": "Messages, relays and the DHT",
}


@dataclass(frozen=True)
class Attack:
    """A row of the catalogue."""

    group: str
    name: str
    attack: str
    outcome: str
    cost: str

    @property
    def row(self) -> str:
        word, _, rest = self.outcome.partition(" ")
        test = f"[`{self.name}`](../tests/attacks/{self.group}/test_{self.name}.py)"
        return f"| {test} | {self.attack} | **{word}** {rest} | {self.cost} |"


def attacks() -> Iterator[Attack]:
    """All attacks, by group; raises `ValueError` for a docstring without its three paragraphs."""
    for group in GROUPS:
        for path in sorted((HERE / group).glob("test_*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            parts = [" ".join(part.split()) for part in text.split("\n\n")]
            if (
                len(parts) != 3
                or not parts[1].startswith(OUTCOMES)
                or not parts[2].startswith("Cost: ")
            ):
                raise ValueError(f"{path} does not say its attack, its outcome and its cost")
            cost = parts[2].removeprefix("Cost: ")
            yield Attack(group, path.stem.removeprefix("test_"), parts[0], parts[1], cost)


def table() -> str:
    """The catalogue as Markdown."""
    lines = []
    for group, title in GROUPS.items():
        lines += ["", f"### {title}", "", "| Test | Attack | Outcome | Cost |", "|---|---|---|---|"]
        lines += [attack.row for attack in attacks() if attack.group == group]
    return "\n".join(lines) + "\n"


def on_the_page() -> str:
    """The catalogue as docs/security.md has it."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def write() -> None:
    """Put the table on the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    write()
