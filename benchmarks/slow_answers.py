"""Answers that are slow to compare, for the grader `math`, and what they cost.

    python -m benchmarks.slow_answers
    python -m benchmarks.slow_answers --answers 100 --seed 2

Prints one JSON object. Each answer passes the grader's bounds on what it looks like, is of a kind
that math-verify takes long to compare with a symbolic answer, and fits the 113 characters of the
slowest one that was met. `cpu_seconds_max` is the CPU time of a grader's process over one answer,
its start not counted.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.common import at_least
from peers.environments import NotGradable
from peers.environments.graders import make_grader
from peers.environments.graders.math import CPU_SECONDS
from swarm.terminal.output import print_json

GOLDS = (
    r"\frac{x^2+1}{x-1}",
    r"\sqrt{x+1}+\sin x",
    r"x^{a}+y^{b}",
    r"\frac{a}{b}+\frac{b}{c}",
)
LETTERS = "xyzabn"


def slow_answers(count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """(kind, a task's answer, a slow answer to it)."""
    chance = random.Random(seed)

    def letter() -> str:
        return chance.choice(LETTERS)

    def total() -> str:
        return f"({letter()}{chance.choice('+-')}{chance.choice(LETTERS + '123')})"

    def power() -> str:
        return total() + f"^{{{chance.randint(5, 12)}}}"

    def wave() -> str:
        name = chance.choice(("sin", "cos", "tan"))
        return rf"\{name}^{{{chance.randint(3, 9)}}}{chance.choice((letter(), total()))}"

    def factorials() -> str:
        one, two = f"({letter()}+{chance.randint(2, 6)})!", f"({letter()}-{chance.randint(1, 3)})!"
        return rf"\frac{{{one}}}{{{two}}}\binom{{{letter()}+{chance.randint(1, 9)}}}{{{letter()}}}"

    def fraction(depth: int) -> str:
        below = letter() if not depth else fraction(depth - 1)
        return rf"{letter()}+\frac{{{letter()}}}{{{below}}}"

    kinds = {
        "powers": lambda: "".join(power() for _ in range(chance.randint(2, 4))),
        "waves": lambda: "+".join(wave() + wave() for _ in range(chance.randint(1, 2))),
        "factorials": lambda: "+".join(factorials() for _ in range(chance.randint(1, 2))),
        "fractions": lambda: "+".join(fraction(chance.randint(2, 4)) for _ in range(2)),
    }
    for _ in range(count):
        kind = chance.choice(sorted(kinds))
        yield kind, chance.choice(GOLDS), kinds[kind]()[:113]


def measure(count: int, seed: int) -> dict[str, Any]:
    """What the grader makes of slow answers, and the CPU time of each."""
    grader = make_grader("math")
    grader.grade(r"\boxed{1}", "1", {})  # starts the process
    reasons: dict[str, Counter[str]] = {}
    slowest, whole = (0.0, ""), 0.0
    for kind, gold, text in slow_answers(count, seed):
        begun = _cpu_seconds()
        reason = "different"
        try:
            given = grader.grade(rf"\boxed{{{text}}}", gold, {})
            reason = "rewarded" if given.reward else next(iter(given.parts), reason)
        except NotGradable as error:
            reason = "overdue" if "CPU time" in str(error) else "not gradable"
        seconds = _cpu_seconds() - begun
        reasons.setdefault(kind, Counter())[reason] += 1
        if reason == "overdue":
            grader.grade(r"\boxed{1}", "1", {})  # starts another
        slowest, whole = max(slowest, (seconds, text)), whole + seconds
    return {
        "answers": count,
        "cpu_seconds_allowed": CPU_SECONDS,
        "cpu_seconds_max": round(slowest[0], 2),
        "cpu_seconds_mean": round(whole / count, 3),
        "slowest": slowest[1],
        "reasons": {kind: dict(found.most_common()) for kind, found in sorted(reasons.items())},
    }


def _cpu_seconds() -> float:
    """CPU time of this process's children, those that ended included."""
    ended, ticks = resource.getrusage(resource.RUSAGE_CHILDREN), os.sysconf("SC_CLK_TCK")
    seconds = ended.ru_utime + ended.ru_stime
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                seconds += (int(fields[11]) + int(fields[12])) / ticks
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=at_least(1), default=10_000)
    parser.add_argument("--seed", type=at_least(0), default=1)
    given = parser.parse_args()
    print_json({"seed": given.seed, **measure(given.answers, given.seed)})


if __name__ == "__main__":
    main()
