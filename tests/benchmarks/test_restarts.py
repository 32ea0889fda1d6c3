from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.restarts import watched
from tests.end_to_end.harness import processes_with


def test_a_restart_is_watched_until_the_next_one_or_for_a_minute() -> None:
    times = [9.0, 10.2, 18.0, 29.5, 30.5, 80.0, 99.0]
    assert watched(10.0, 30.0, times) == (10.0, 29.5)
    assert watched(10.0, 99.0, times) == (10.0, 80.0)
    assert watched(31.0, 50.0, times) == (31.0, 80.0), "no step came between"


@pytest.mark.long
def test_a_run_of_restarts_keeps_its_books_and_leaves_no_process_behind(tmp_path: Path) -> None:
    arguments = ["--submissions", "120", "--peers", "validator", "trainer"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.restarts", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert not processes_with(str(tmp_path))
    report = json.loads(done.stdout)
    assert report["steps"] == 30
    assert report["accepted"] >= report["trained_on"] >= 120
    assert {(each["peer"], each["by"]) for each in report["restarts"]} == {
        (peer, by) for peer in ("validator", "trainer") for by in ("SIGTERM", "SIGKILL")
    }
    for each in report["restarts"]:
        assert each["seconds_without_a_step"] >= each["next_step_seconds"] - 0.1
