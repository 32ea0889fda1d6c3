from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cpu_samples import Samples, activity, read_samples, sampled_environment
from benchmarks.tax import OTHER, REST, RULES, Side, report, sum_up

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
{end}
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
    program = PROGRAM.format(end="os.wait()")
    subprocess.run([sys.executable, "-c", program], env=sampled_environment(tmp_path), check=True)
    samples = read_samples(tmp_path)
    assert len(samples) == 2
    # Above 0.2 and 0.3, since the first sample of each also holds what ran before.
    assert 0.15 <= seconds_in(samples, "parent") <= 0.4
    assert 0.25 <= seconds_in(samples, "child") <= 0.5


MEASURE = """
import json, sys
from pathlib import Path
from benchmarks.tax import measure
side = measure([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
print(json.dumps([side.cpu_seconds, side.processes["command"]]))
"""


def measured(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`measure` in a process of its own: it waits for all children of its process."""
    return subprocess.run(
        [sys.executable, "-c", MEASURE, program, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_a_process_counts_that_outlives_its_parent(tmp_path: Path) -> None:
    done = measured(PROGRAM.format(end=""), tmp_path / "samples")
    cpu_seconds, command_seconds = json.loads(done.stdout)
    assert 0.5 <= cpu_seconds < 1.5
    assert command_seconds >= 0.4


def test_a_command_that_fails_ends_the_benchmark_with_a_sentence(tmp_path: Path) -> None:
    done = measured("raise SystemExit(3)", tmp_path / "samples")
    assert done.returncode == 1 and done.stderr.endswith("ended with status 3\n")


def test_a_stack_counts_for_its_innermost_known_frame() -> None:
    stack = ["/x/swarm/commands/start.py:start", "/y/trio/_core/_run.py:unrolled_run"]
    assert activity([*stack, "/y/trio/_socket.py:send"], RULES, OTHER) == "event loops"
    assert activity([*stack, "/x/swarm/gossip/gossip.py:_write"], RULES, OTHER) == "gossip"
    assert activity([*stack, "<frozen importlib._bootstrap>:x"], RULES, OTHER) == "imports"
    assert activity(["/y/some.py:x"], RULES, OTHER) == OTHER


def test_tables_name_children_by_their_peers_and_add_up() -> None:
    home = "python -m swarm.peer --role inference --home /d/peers/inference-2 --listen x"
    training = ["/x/peers/trainer/learning/step.py:step"]
    samples = [
        Samples(1, home, [(1.0, ["/x/swarm/gossip/gossip.py:_write"])]),
        Samples(2, "python -m swarm.world.fork_server", [(3.0, training)]),
        Samples(3, "python -m swarm.world.fork_server", [(0.5, ["<frozen importlib>:x"])]),
    ]
    side = sum_up(samples, {2: "trainer/trainer"}, total=5.0)
    assert side.processes == {
        "trainer/trainer": 3.0,
        "inference-2": 1.0,
        "fork servers": 0.5,
        REST: 0.5,
    }
    assert sum(side.activities.values()) == 5.0


def test_the_tax_is_the_median_over_rounds_with_its_spread() -> None:
    def side(seconds: float) -> Side:
        return Side(seconds, {}, {"training": seconds})

    told = report([(side(2.0), side(8.0)), (side(2.0), side(4.0)), (side(2.0), side(5.0))])
    assert (told["tax"], told["tax_least"], told["tax_most"]) == (2.5, 2.0, 4.0)
    assert told["activities"] == {"training": [5.0, 2.0]}
