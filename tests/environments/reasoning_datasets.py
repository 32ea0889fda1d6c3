"""Which data sets of reasoning-gym a run may use: each is checked, and the refused are listed.

    python -m tests.environments.reasoning_datasets
    python -m tests.environments.reasoning_datasets --datasets chain_sum,countdown --tasks 20
    python -m tests.environments.reasoning_datasets --write

Prints one JSON object. A data set passes if two processes draw the same tasks, in different orders;
if each task's own answer earns 1; if neither junk nor the answer of another task does; and if
neither a draw nor a score takes longer than `SECONDS_MAX`.
`--write` writes the list of the refused into `peers/environments/graders/reasoning_refused.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common import at_least
from peers.environments.graders import reasoning_refused
from peers.environments.graders.pool import Pool, ProcessFailed, ServiceError
from peers.environments.graders.reasoning_gym import SERVICE
from swarm.terminal.output import print_json

SECONDS_MAX = 10.0
JUNK = (
    "", "junk", "\0", "?", "[[[", "]", "%s", "None", "nan", "🙂", "the answer", "x" * 10_000,
    "__import__('os').system('true')", "exec('while 1: pass')", "9**9**9", "[" * 1000,
)  # fmt: skip
"""Texts that are no answer to any task; [] and 0 may be one."""

HEADER = '''"""Data sets of reasoning-gym that the environment refuses, with the reason.

Written by `python -m tests.environments.reasoning_datasets --write`.
"""

REFUSED: dict[str, str] = {
'''


class Checker:
    """Asks two processes."""

    def __init__(self, tasks: int) -> None:
        self._seeds = range(1000, 1000 + tasks)
        self._pools = [Pool(SERVICE, SECONDS_MAX, 1) for _ in range(2)]
        self.names: list[str] = self._pools[0].ask({"what": "names"})

    def why_not(self, name: str) -> str | None:
        """Why a run may not use a data set."""
        if name == "composite":
            return "a mixture is made by naming several data sets"
        first, second = self._pools
        try:
            drawn = [self._draw(first, name, seed) for seed in self._seeds]
            again = [self._draw(second, name, seed) for seed in reversed(self._seeds)]
            return self._why_not(name, drawn, again[::-1])
        except (ProcessFailed, ServiceError) as error:
            return f"a call fails ({error!s:.150})"

    def _why_not(
        self, name: str, drawn: list[dict[str, str]], again: list[dict[str, str]]
    ) -> str | None:
        if drawn != again:
            return "equal seeds give different tasks in two processes"
        earned_by_another = 0
        for index, (seed, task) in enumerate(zip(self._seeds, drawn, strict=True)):
            answer, other = task["answer"], drawn[index - 1]["answer"]
            if not answer:
                return "one of its tasks has no answer that could be checked"
            if self._score(name, seed, answer) != 1:
                return f"its own answer {answer!r:.40} does not earn 1"
            for junk in JUNK:
                if self._score(name, seed, junk) == 1:
                    return f"the text {junk!r:.40} earns 1"
            earned_by_another += other != answer and self._score(name, seed, other) == 1
        if earned_by_another > len(drawn) // 4:
            return "the answer of another task earns 1"
        return None

    @staticmethod
    def _draw(pool: Pool, name: str, seed: int) -> dict[str, str]:
        request = {"what": "draw", "dataset": name, "settings": {}, "seed": seed}
        drawn: dict[str, str] = pool.ask(request)
        return drawn

    def _score(self, name: str, seed: int, text: str) -> float:
        request = {"what": "score", "dataset": name, "settings": {}, "seed": seed, "text": text}
        reply = self._pools[0].ask(request)
        return float(reply.get("score", 0.0))


def write(refused: dict[str, str]) -> None:
    """Write the list of the refused into the package."""
    lines = [f"    {name!r}: {reason!r},\n" for name, reason in sorted(refused.items())]
    path = Path(reasoning_refused.__file__)
    path.write_text(HEADER + "".join(lines) + "}\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--datasets", default="", help="names, separated by commas; default: all")
    parser.add_argument("--tasks", type=at_least(2), default=10, help="per data set")
    parser.add_argument("--write", action="store_true", help="write the list of the refused")
    given = parser.parse_args()
    checker = Checker(given.tasks)
    names = given.datasets.split(",") if given.datasets else checker.names
    refused = {name: reason for name in names if (reason := checker.why_not(name))}
    if given.write:
        write(refused)
    print_json({"tasks": given.tasks, "checked": len(names), "refused": refused})


if __name__ == "__main__":
    main()
