from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cpu_samples import Samples, activity, read_samples, sampled_environment
from benchmarks.tax import OTHER, RULES, Side, report

PROGRAM = """
import os, time
def burn(seconds):
    begun = time.process_time()
    while time.process_time() - begun < seconds:
        pass
def parent(): burn(0.2)
def child(): burn(0.3)
if os.fork() == 0:
    child()
    os._exit(0)
parent()
time.sleep(0.1)
os.wait()
"""


def seconds_in(samples: list[Samples], function: str) -> float:
    return sum(
        seconds
        for process in samples
        for seconds, frames in process.stacks
        if any(frame.endswith(f":{function}") for frame in frames)
    )


@pytest.mark.slow
def test_the_cpu_time_of_a_process_and_of_its_fork_is_sampled_by_function(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], env=sampled_environment(tmp_path), check=True)
    samples = read_samples(tmp_path)
    assert len(samples) == 2
    # Above 0.2 and 0.3, since the first sample of each also holds what ran before.
    assert 0.15 <= seconds_in(samples, "parent") <= 0.4
    assert 0.25 <= seconds_in(samples, "child") <= 0.5


def test_a_stack_counts_for_its_innermost_known_frame() -> None:
    stack = ["/x/swarm/commands/start.py:start", "/y/trio/_core/_run.py:unrolled_run"]
    assert activity([*stack, "/y/trio/_socket.py:send"], RULES, OTHER) == "event loops"
    assert activity([*stack, "/x/swarm/gossip/gossip.py:_write"], RULES, OTHER) == "gossip"
    assert activity([*stack, "<frozen importlib._bootstrap>:x"], RULES, OTHER) == "imports"
    assert activity(["/y/some.py:x"], RULES, OTHER) == OTHER


def test_the_tax_is_the_median_over_rounds_with_its_spread() -> None:
    def side(seconds: float) -> Side:
        return Side(seconds, {}, {"training": seconds})

    told = report(
        [(side(2.0), side(8.0), 0.3), (side(2.0), side(4.0), 0.1), (side(2.0), side(5.0), 0.2)]
    )
    assert (told["tax"], told["tax_least"], told["tax_most"]) == (2.5, 2.0, 4.0)
    assert told["activities"] == {"training": [5.0, 2.0]}
    assert told["trainer_idle_share"] == 0.2
