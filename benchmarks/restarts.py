"""Seconds without a step when real peers are restarted, and a check of the run's ledger.

    python -m benchmarks.restarts
    python -m benchmarks.restarts --submissions 5100 --undisturbed 5000 --peers validator trainer

Prints one JSON object. Seven processes (bootstrap, relay, trainer, validator, three inference
peers) train the demo's tiny model on loopback until about `--submissions` submissions are accepted
and the run is over. Once `--undisturbed` of them are accepted (0: at once), each named peer is
ended by SIGTERM and by SIGKILL, with its children, evenly spread over the remaining steps, in an
order drawn from the seed. A script starts it again after a second, the trainer with --resume. For
each restart the object has `next_step_seconds`, from the signal to the next step, and the longest
gap without a step before the next restart (within a minute), with the causes of its seconds.
Afterwards the trusted peers' logs are checked: no submission was trained on twice, and no accepted
submission was lost.
"""

from __future__ import annotations

import argparse
import random
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
from swarm.terminal.output import print_json, write_json
from tests.end_to_end.harness import GROUPS_PER_STEP, GROUPS_PER_SUBMISSION
from tests.end_to_end.ledgers import check_accounts, check_nobody_was_wronged

START_SECONDS = 120.0
AWAY_SECONDS = 1.0
WATCHED_SECONDS = 60.0
"""Time after a restart within which gaps count: a later gap has another reason."""
STALLED_SECONDS = 400.0
"""Time without a step after which the run has failed."""


def steps_for(submissions: int) -> int:
    return -(-submissions * GROUPS_PER_SUBMISSION // GROUPS_PER_STEP)


async def wait_for(real: RealSwarm, step: int) -> None:
    """Wait until this many steps are made; raises `AssertionError` when none is made for long."""
    trainer = real.peers["trainer"]
    while (made := len(steps_made(trainer)) - 1) < step:
        await trainer.says("trainer.checkpoint_published", step=made + 1, seconds=STALLED_SECONDS)


async def restart_each(
    real: RealSwarm, names: list[str], first: int, last: int, chance: random.Random
) -> list[dict[str, Any]]:
    """Restart each of these peers twice between two steps; return which, how and when."""
    todo = [(name, which) for name in names for which in (signal.SIGTERM, signal.SIGKILL)]
    chance.shuffle(todo)
    done = []
    for number, (name, which) in enumerate(todo, 1):
        step = first + number * (last - first) // (len(todo) + 1)
        await wait_for(real, step)
        peer = real.peers[name]
        since = len(peer.events)
        print(f"step {step}: {which.name} to {name}", file=sys.stderr)
        done.append({"peer": name, "by": which.name, "step": step, "time": time.time()})
        real.kill(name, which)
        await peer.status.wait_until(lambda status: status is not None)
        await peer.status.wait_until(lambda status: status is None)
        await peer.says("peer.listening", since=since, seconds=START_SECONDS)
    return done


def watched(begin: float, end: float, times: list[float]) -> tuple[float, float]:
    """The time span in which a restart is measured.

    It ends with the last step before the next restart, or with the first step after a minute.
    """
    until = begin + WATCHED_SECONDS
    before = [t for t in times if begin < t <= end]
    if end <= until and before:
        return begin, before[-1]
    return begin, next((t for t in times if t >= min(end, until)), times[-1])


def told(real: RealSwarm, done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The restarts, with the seconds without a step that they caused."""
    times = steps_made(real.peers["trainer"])
    ends = [*(each["time"] for each in done[1:]), times[-1]]
    for each, end in zip(done, ends, strict=True):
        begin, until = watched(each.pop("time"), end, times)
        longest = max(gaps(real, begin, until, 0.0), key=lambda gap: float(gap["seconds"]))
        each["next_step_seconds"] = round(next(t for t in times if t > begin) - begin, 1)
        each["seconds_without_a_step"] = longest["seconds"]
        each["went_into"] = longest["went_into"]
        each["complaints"] = longest["complaints"]
    return done


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    steps = steps_for(options.submissions)
    async with running_swarm(steps, lambda: AWAY_SECONDS) as real:
        trainer = real.peers["trainer"]
        await trainer.says("trainer.checkpoint_published", step=1, seconds=START_SECONDS)
        began = time.time()
        first = steps_for(options.undisturbed)
        await wait_for(real, first)
        done = await restart_each(real, options.peers, first, steps, random.Random(options.seed))
        real.ending = True
        await wait_for(real, steps)
        await real.peers.complete(STALLED_SECONDS)
        for peer in [trainer, *real.peers.of_role("inference")]:
            await peer.ended(30)
        accounts = check_accounts(real.peers)
        check_nobody_was_wronged(accounts)
        times = steps_made(trainer)
        restarts = told(real, done)
        return {
            "seed": options.seed,
            "steps": steps,
            "seconds": round(times[-1] - began, 1),
            "median_step_seconds": round(statistics.median(b - a for a, b in pairwise(times)), 2),
            "accepted": len(accounts.accepted),
            "trained_on": len(accounts.trained),
            "stale": len(accounts.stale),
            "left_over": len(accounts.pool),
            "trained_on_twice": 0,  # else `check_accounts` raises, likewise
            "lost": 0,
            "next_step_seconds": spread([r["next_step_seconds"] for r in restarts]),
            "seconds_without_a_step": spread([r["seconds_without_a_step"] for r in restarts]),
            "ended_by_themselves": [
                f"{deed.peer} {deed.what}" for deed in real.deeds if deed.by_itself
            ],
            "restarts": restarts,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Seconds without a step when real peers are restarted."
    )
    parser.add_argument("--submissions", type=at_least(100), default=5000, help="accepted in all")
    parser.add_argument(
        "--undisturbed", type=at_least(0), default=0, help="of them, before the first restart"
    )
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--json", type=Path, help="file to write the report to as well")
    options = parser.parse_args()
    if options.undisturbed >= options.submissions:
        parser.error(
            f"--undisturbed {options.undisturbed} leaves nothing of --submissions "
            f"{options.submissions}"
        )
    report = trio.run(measure, options)
    if options.json is not None:
        write_json("--json", report, options.json)
    print_json(report)


if __name__ == "__main__":
    main()
