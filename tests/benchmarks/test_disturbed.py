from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.harness import processes_with


@pytest.mark.long
def test_a_disturbed_swarm_is_measured_and_leaves_no_process_behind(tmp_path: Path) -> None:
    arguments = ["--seed", "1", "--seconds", "30", "--quiet", "10", "--every", "4", "--gap", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.disturbed", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert not processes_with(str(tmp_path))
    report = json.loads(done.stdout)
    assert report["undisturbed_steps_per_minute"] > 0
    assert report["disturbances"] > 0
    assert report["steps"] >= sum(report["steps_by_minute"])
    for gap in report["gaps"]:
        assert gap["seconds"] >= 1
        assert sum(gap["went_into"].values()) == pytest.approx(gap["seconds"], abs=0.5)
