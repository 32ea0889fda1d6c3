"""Every cell of the matrix works, by the path that docs/network.md has."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import trio

from tests.docs.pages import text
from tests.nat.matrix import WORKING, matrix, table
from tests.nat.topology import KINDS, MISSING, is_possible

pytestmark = [pytest.mark.nat, pytest.mark.skipif(not is_possible(), reason=MISSING)]


def published() -> list[list[str]]:
    """The cells of the matrix in docs/network.md, a list per row."""
    rows = re.findall(r"^\| \*\*(.+)\*\* \|(.+)\|$", text("docs/network.md"), re.M)
    return [[name, *(cell.strip() for cell in cells.split("|"))] for name, cells in rows]


def test_the_matrix(tmp_path: Path) -> None:
    wanted = os.environ.get("SWARM_NAT_KINDS", "")
    kinds = [kind for kind in KINDS if not wanted or kind.name in wanted.split(";")]
    cells = trio.run(matrix, kinds, tmp_path)
    print(table(kinds, cells))
    assert len(cells) == len(kinds) ** 2
    assert [each for each in cells if each["path"] not in WORKING] == []


def test_the_page_has_every_cell() -> None:
    rows = {row[0]: row[1:] for row in published()}
    assert list(rows) == [kind.name for kind in KINDS]
    assert all(len(row) == len(KINDS) and set(row) <= set(WORKING) for row in rows.values())
