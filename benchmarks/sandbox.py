"""What the sandbox costs: the start of a program, and programs per second side by side.

    python -m benchmarks.sandbox
    python -m benchmarks.sandbox --programs 100 --parallel 4 --rounds 7

Prints one JSON object. `start_ms` is the wall time of an empty Python program in each means of
isolation, one at a time; `bare_ms` is the same program as a child process without walls, in the
same round, and `walls_ms` their difference. `programs_per_second` runs empty programs `parallel` at
a time; `graded_per_second` grades reference solutions of the environment `code`, each with its
hidden tests. Every figure is the median of the rounds;
`_least` and `_most` are the smallest and the largest.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.arguments import at_least
from benchmarks.spread import load_average, spread
from peers.environments import Transcript, task_of
from peers.environments.code import Code
from peers.sandbox import PYTHON, Means, Program, Sandbox, probe
from peers.sandbox.means import root
from swarm.terminal.output import print_json

EMPTY = Program(argv=(PYTHON, "-c", ""))


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def side_by_side(work: Callable[[int], object], programs: int, parallel: int) -> float:
    """Programs per second, `parallel` at a time."""
    with ThreadPoolExecutor(parallel) as pool:
        return programs / seconds_of(lambda: list(pool.map(work, range(programs))))


def measure(means: Means, programs: int, parallel: int, rounds: int) -> dict[str, Any]:
    """The figures of one means of isolation."""
    sandbox = Sandbox(parallel, means)
    environment = Code(run_program=sandbox.run)
    tasks = [task_of(environment, number.to_bytes(32, "big")) for number in range(programs)]
    bare: list[float] = []
    start: list[float] = []
    rates: list[float] = []
    graded: list[float] = []

    def grade(number: int) -> None:
        task = tasks[number]
        if environment.grade(task, Transcript.of(task.answer)).reward != 1.0:
            raise AssertionError(f"the reference solution of {task.prompt!r} fails")

    command = [root().interpreter, "-c", ""]
    sandbox.run(EMPTY)
    for _ in range(rounds):
        bare.append(1e3 * seconds_of(lambda: subprocess.run(command, check=True)))
        start.append(1e3 * seconds_of(lambda: sandbox.run(EMPTY)))
        rates.append(side_by_side(lambda _: sandbox.run(EMPTY), programs, parallel))
        graded.append(side_by_side(grade, programs, parallel))
    walls = [each - least for each, least in zip(start, bare, strict=True)]
    return {
        **spread("bare_ms", bare, 1),
        **spread("start_ms", start, 1),
        **spread("walls_ms", walls, 1),
        **spread("programs_per_second", rates, 2),
        **spread("graded_per_second", graded, 2),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", type=at_least(1), default=20, help="per round")
    parser.add_argument("--parallel", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    given = parser.parse_args()
    report = probe()
    report.best()
    print_json(
        {
            **vars(given),
            "load_average": load_average(),
            "unavailable": report.reasons,
            "means": {
                means: measure(means, given.programs, given.parallel, given.rounds)
                for means in report.works
            },
        }
    )


if __name__ == "__main__":
    main()
