"""Seconds without a step when real peers are restarted in a run with many accepted submissions.

    python -m benchmarks.restarts --submissions 5000
    python -m benchmarks.restarts --submissions 500 --peers validator trainer --json restarts.json

Prints one JSON object. Seven processes (bootstrap, relay, trainer, validator, three inference
peers) train the demo's tiny model on loopback until so many submissions are accepted. Then each
peer named is ended twice, by SIGTERM and by SIGKILL with its children, and started again at once,
the trainer with --resume. Each time without a step is told: how long, and what its seconds went
into. What a step takes undisturbed is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio

from benchmarks.arguments import at_least
from benchmarks.real_swarm import NAMES, RealSwarm, gaps, running_swarm, spread, steps_made

STEPS = 1_000_000
"""More than can be made."""
SUBMISSION_SECONDS = 5.0
"""The slowest pace that is worth waiting for."""
STEP_DEADLINE_SECONDS = 400.0
SETTLE_SECONDS = 15.0
"""Between a step after one restart and the next restart."""


def accepted(real: RealSwarm) -> int:
    verdicts = real.peers["validator"].heard("validator.verdict")
    return sum(event["outcome"] == "accepted" for event in verdicts)


async def restart(real: RealSwarm, name: str, which: signal.Signals) -> dict[str, Any]:
    """End a peer and wait for a step after it is back; how long there was none."""
    trainer = real.peers["trainer"]
    began = time.time()
    real.kill(name, which)
    away = True
    with trio.move_on_after(STEP_DEADLINE_SECONDS):
        while away:
            await trainer.said.wait_change()
            back = [d.time for d in real.deeds if d.peer == name and d.what == "started"]
            away = not back or back[-1] < began or steps_made(trainer)[-1] < back[-1]
    until = time.time()
    before = max((t for t in steps_made(trainer) if t < began), default=began)
    longest = max(gaps(real, before, until, 0.0), key=lambda gap: float(gap["seconds"]))
    print(f"{name} {which.name}: {longest['seconds']} s without a step", file=sys.stderr)
    return {
        "peer": name,
        "by": which.name,
        "accepted": accepted(real),
        "seconds_without_a_step": longest["seconds"],
        "went_into": longest["went_into"],
        "complaints": longest["complaints"],
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    async with running_swarm(STEPS, lambda: 0.0) as real:
        trainer, validator = real.peers["trainer"], real.peers["validator"]
        with trio.fail_after(60.0 + SUBMISSION_SECONDS * options.submissions):
            while True:
                missing = options.submissions - accepted(real)
                if missing <= 0:
                    break
                for _ in range(missing):  # each is a line at least
                    await validator.said.wait_change()
        times = steps_made(trainer)
        restarts = []
        for name in options.peers:
            for which in (signal.SIGTERM, signal.SIGKILL):
                restarts.append(await restart(real, name, which))
                await trio.sleep(SETTLE_SECONDS)
        return {
            "submissions": options.submissions,
            "steps": len(times),
            "undisturbed_step_seconds": round(
                statistics.median(b - a for a, b in pairwise(times)), 2
            ),
            "seconds_without_a_step": spread([r["seconds_without_a_step"] for r in restarts]),
            "restarts": restarts,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Seconds without a step when real peers are restarted in an old run."
    )
    parser.add_argument("--submissions", type=at_least(1), default=5000, help="accepted before")
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--json", type=Path, help="file to write the report to as well")
    options = parser.parse_args()
    report = json.dumps(trio.run(measure, options), indent=1)
    if options.json is not None:
        options.json.write_text(report + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
