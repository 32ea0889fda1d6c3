"""Answers that are slow to compare, for the grader `math`, and what they cost.

Each passes the grader's bounds on what it looks like, is of a kind that math-verify takes long to
compare with a symbolic answer, and fits the 113 characters of the slowest one that was met.

    python -m tests.environments.slow_answers COUNT SEED

prints the CPU seconds of the slowest of so many, and what the grader made of them.
"""

from __future__ import annotations

import os
import random
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from peers.environments import NotGradable
from peers.environments.graders import make_grader

GOLDS = (r"\frac{x^2+1}{x-1}", r"\sqrt{x+1}+\sin x", r"x^{a}+y^{b}", r"\frac{a}{b}+\frac{b}{c}")
LETTERS = "xyzabn"


def slow_answers(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """(a task's answer, a slow answer to it)."""
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
        yield chance.choice(GOLDS), kinds[kind]()[:113]


def measure(count: int, seed: int) -> tuple[float, set[str]]:
    """The most CPU seconds of a grader's process over one answer, its start not counted, and what
    the grader made of the answers."""
    grader = make_grader("math")
    grader.grade(r"\boxed{1}", "1", {})  # starts the process
    outcomes, slowest = set(), 0.0
    for gold, text in slow_answers(count, seed):
        begun = _cpu_seconds()
        reason = "different"
        try:
            given = grader.grade(rf"\boxed{{{text}}}", gold, {})
            reason = "rewarded" if given.reward else next(iter(given.parts), reason)
        except NotGradable as error:
            reason = "overdue" if "CPU time" in str(error) else "not gradable"
        slowest = max(slowest, _cpu_seconds() - begun)
        outcomes.add(reason)
        if reason == "overdue":
            grader.grade(r"\boxed{1}", "1", {})  # starts another
    return slowest, outcomes


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


if __name__ == "__main__":
    print(*measure(int(sys.argv[1]), int(sys.argv[2])))
