"""Every cell of the matrix works, or is named as unsolved."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from tests.nat.matrix import UNSOLVED, WORKING, matrix, table
from tests.nat.topology import KINDS, MISSING, is_possible

pytestmark = [pytest.mark.nat, pytest.mark.skipif(not is_possible(), reason=MISSING)]


def test_the_matrix(tmp_path: Path) -> None:
    wanted = os.environ.get("SWARM_NAT_KINDS", "")
    kinds = [kind for kind in KINDS if not wanted or kind.name in wanted.split(";")]
    cells = trio.run(matrix, kinds, tmp_path)
    print(table(kinds, cells))
    assert len(cells) == len(kinds) ** 2
    failed = [each for each in cells if each["path"] not in WORKING]
    assert {(each["here"], each["there"]) for each in failed} <= set(UNSOLVED), failed
