from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ledger_reads import measure
from tests.end_to_end.harness import processes_with


@pytest.mark.long
@pytest.mark.parametrize("flood", ["sockets", "status"])
def test_verdicts_go_on_beside_a_flood_and_no_process_is_left(tmp_path: Path, flood: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.flooded", flood, "--rounds", "1", "--seconds", "5"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert not processes_with(str(tmp_path))
    report = json.loads(done.stdout)
    assert report["count"] > 0
    assert report["with"][0]["verdicts"] > 0


def test_what_reads_cost_is_measured() -> None:
    found = measure(members=20, asked=2000, seconds=2)
    assert found["answered"] < 2000
    assert found["megabytes"] == pytest.approx(
        found["answered"] * found["answer_bytes"] / 1e6, abs=0.02
    )
