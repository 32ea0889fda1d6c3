from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_broadcast_between_processes_is_held_against_its_bound() -> None:
    arguments = ["--mib", "1", "--uplinks", "8,8,8"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loopback", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["bytes"] == 1 << 20
    assert report["uplinks_mbps"] == [8.0, 8.0, 8.0]
    assert report["binding_term"] == "source uplink"
    assert report["bound_seconds"] == pytest.approx(1.049, abs=0.001)
    assert len(report["seconds"]) == 2
    assert report["ratio"] == pytest.approx(max(report["seconds"]) / 1.049, abs=0.002)
    assert report["ratio"] > 0.85  # an uplink may make up for a tenth of a second
    assert report["ratio_median"] <= report["ratio"]
