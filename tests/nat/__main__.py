"""Print the matrix: `python -m tests.nat [KIND…]`, as root."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import trio

from tests.nat.matrix import matrix, table
from tests.nat.topology import KINDS, MISSING, is_possible

if not is_possible():
    sys.exit(MISSING)
kinds = [kind for kind in KINDS if not sys.argv[1:] or kind.name in sys.argv[1:]]
with tempfile.TemporaryDirectory(prefix="swarm-nat-") as folder:
    cells = trio.run(matrix, kinds, Path(folder))
for each in cells:
    print(json.dumps(each))
print(table(kinds, cells))
