"""What graders cost, and what they make of junk.

    python -m benchmarks.graders
    python -m benchmarks.graders --junk 1000 --answers 50 --rounds 3

Prints one JSON object. `answers_per_second` grades right and wrong answers of each grader's own
tasks, one at a time, in `rounds` rounds: the median, `_least` and `_most`. `junk` gives texts of
`benchmarks.junk` to the grader `math`: how many of each kind earned nothing for which reason, how
many were not gradable, hung, or were rewarded, and the slowest.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

from benchmarks.arguments import at_least
from benchmarks.junk import junk
from benchmarks.spread import load_average, spread
from peers.environments import NotGradable, Transcript, grade, load, task_of
from peers.environments.graders import make_grader
from peers.sandbox import probe
from swarm.terminal.output import print_json

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "math": {"level": 3},
    "reasoning-gym": {"datasets": ["chain_sum", "gcd", "spell_backward", "simple_equations"]},
    "code": {"steps": 1},
}


def rates(name: str, answers: int, rounds: int) -> dict[str, float]:
    """Answers per second, half of them right."""
    found = []
    for _ in range(rounds + 1):
        environment = load(name, "1", ENVIRONMENTS[name])  # remembers no answer of another round
        tasks = [task_of(environment, number.to_bytes(32, "big")) for number in range(answers)]
        begun = time.perf_counter()
        for index, task in enumerate(tasks):
            text = task.answer if index % 2 else tasks[index - 1].answer
            reward = grade(environment, task, Transcript.of(text)).reward
            if index % 2 and reward != 1:
                raise AssertionError(f"the answer of {task.prompt!r} earns {reward}")
        found.append(answers / (time.perf_counter() - begun))
    return spread("answers_per_second", found[1:], 1)  # the first round starts the processes


def plain_rates(name: str, answers: int, rounds: int) -> dict[str, float]:
    """Answers per second of a grader without a library."""
    grader, found = make_grader(name), []
    for _ in range(rounds):
        begun = time.perf_counter()
        for number in range(100 * answers):
            grader.grade(f"The answer is {number}.", str(number), {})
        found.append(100 * answers / (time.perf_counter() - begun))
    return spread("answers_per_second", found, 0)


def judge_junk(count: int) -> dict[str, Any]:
    """What the grader `math` makes of junk."""
    grader = make_grader("math")
    reasons: dict[str, Counter[str]] = {}
    slowest, rewarded, undecided = (0.0, ""), [], []
    begun = time.perf_counter()
    for kind, gold, text in junk(count):
        started = time.perf_counter()
        try:
            given = grader.grade(text, gold, {})
            reason = "rewarded" if given.reward else next(iter(given.parts), "different")
        except NotGradable as error:
            reason = "not gradable"
            undecided.append(str(error)[:200])
        if reason == "rewarded":
            rewarded.append(f"{gold}: {text[:100]}")
        reasons.setdefault(kind, Counter())[reason] += 1
        slowest = max(slowest, (time.perf_counter() - started, text[:100]))
    return {
        "texts": count,
        "seconds": round(time.perf_counter() - begun, 1),
        "rewarded": rewarded,
        "not_gradable": undecided,
        "slowest_seconds": round(slowest[0], 2),
        "slowest": slowest[1],
        "reasons": {kind: dict(found.most_common()) for kind, found in reasons.items()},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--junk", type=at_least(1), default=10_000)
    parser.add_argument("--answers", type=at_least(2), default=100, help="per round")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    given = parser.parse_args()
    names = [name for name in ENVIRONMENTS if name != "code" or probe().works]
    graders = {name: plain_rates(name, given.answers, given.rounds) for name in ("exact", "number")}
    graders |= {name: rates(name, given.answers, given.rounds) for name in names}
    print_json(
        {
            **vars(given),
            "load_average": load_average(),
            "graders": graders,
            "junk": judge_junk(given.junk),
        }
    )


if __name__ == "__main__":
    main()
