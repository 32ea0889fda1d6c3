"""The table of models in `docs/engines.md`: `python -m tests.docs.models_table` writes it."""

from __future__ import annotations

import re

from peers.engines.families import FAMILIES
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "engines.md"
_TABLE = re.compile(r"(?<=\n)\| Family \| `model_type` \|.*\n(?:\|.*\n)+")


def table() -> str:
    """The table, made from the families."""
    rows = [
        "| Family | `model_type` | Beyond Llama | Engine | Trainer and SFT |",
        "|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        capped = "attn_logit_softcapping" in family.defaults
        trainer = "yes; on a CPU with `eager` attention" if capped else "yes"
        rows.append(f"| {family.title} | `{name}` | {family.notes} | yes | {trainer} |")
    return "\n".join(rows) + "\n"


def shown() -> str:
    """The table on the page."""
    match = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None, "docs/engines.md has no table of models"
    return match[0]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(shown(), table()), encoding="utf-8")
