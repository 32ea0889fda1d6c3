"""Steps of real peers on loopback while peers and their children are killed and stopped.

    python -m benchmarks.disturbed --seed 1
    python -m benchmarks.disturbed --seed 1 --seconds 120 --every 5 --json disturbed-1.json

Prints one JSON object. Seven processes (bootstrap, relay, trainer, validator, three inference
peers) train the demo's tiny model. The first minute is undisturbed and gives the reference pace.
From then on, at times drawn from the seed, one peer of each role is disturbed: by SIGKILL (with its
children; a script starts it again after 1 to 4 s, the trainer with --resume), by SIGSTOP for 3 to
20 s, or by SIGKILL of one compute child. Each gap without a step is reported with the cause of
every second, the disturbances shortly before and in it, and the peers' complaints.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import trio

from benchmarks.arguments import at_least, number_where
from benchmarks.real_swarm import (
    VICTIMS,
    RealSwarm,
    by_cause,
    gaps,
    pace,
    per_minute,
    running_swarm,
    spread,
    steps_made,
)
from swarm.terminal.output import print_json, write_json

STEPS = 1_000_000
"""More steps than the benchmark can make."""
START_SECONDS = 120.0
"""Time limit for the first steps."""
AWAY_SECONDS = (1.0, 4.0)
STOPPED_SECONDS = (3.0, 20.0)
WITH_CHILDREN = ("trainer", "validator", "inference-1")


async def disturb(real: RealSwarm, every_seconds: float, chance: random.Random) -> None:
    """Disturb one victim after another, until cancelled."""
    async with trio.open_nursery() as nursery:
        while True:
            await trio.sleep(chance.expovariate(1 / every_seconds))
            name = chance.choice(VICTIMS)
            what = chance.choice(["kill", "stop", "child"])
            stopped_seconds = chance.uniform(*STOPPED_SECONDS)
            lot = chance.random()
            if name in real.busy or real.peers[name].status.value is not None:
                continue  # it is being disturbed already
            if what == "stop":
                nursery.start_soon(real.stop, name, stopped_seconds)
            elif what == "child" and name in WITH_CHILDREN:
                real.kill_child(name, lambda some: some[int(lot * len(some))])  # noqa: B023
            else:
                real.busy.add(name)
                real.kill(name)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(options.seed)
    away = random.Random(options.seed + 1)
    async with running_swarm(STEPS, lambda: away.uniform(*AWAY_SECONDS)) as real:
        trainer = real.peers["trainer"]
        with trio.fail_after(START_SECONDS):
            await trainer.says("trainer.checkpoint_published", step=5, seconds=START_SECONDS)
        began = time.time()
        print("the undisturbed minute begins", file=sys.stderr)
        await trio.sleep(options.quiet)
        disturbed = time.time()
        print("disturbed from now on", file=sys.stderr)
        with trio.move_on_after(options.seconds - options.quiet):
            await disturb(real, options.every, chance)
        until = time.time()
        times = steps_made(trainer)
        found = gaps(real, disturbed, until, options.gap)
        undisturbed = pace(times, began, disturbed)
        kept = pace(times, disturbed, until)
        return {
            "seed": options.seed,
            "seconds": options.seconds,
            "every_seconds": options.every,
            "steps": sum(t >= began for t in times),
            "steps_by_minute": per_minute(times, began, until),
            "undisturbed_steps_per_minute": undisturbed,
            "disturbed_steps_per_minute": kept,
            "pace_kept": round(kept / max(undisturbed, 1e-9), 3),
            "disturbances": sum(
                deed.what.startswith(("SIGKILL", "stopped")) for deed in real.deeds
            ),
            "ended_by_themselves": [
                f"{deed.time - began:.0f} s: {deed.peer} {deed.what}"
                for deed in real.deeds
                if deed.by_itself
            ],
            "gap_seconds": spread([gap["seconds"] for gap in found]),
            "seconds_in_gaps": round(sum(gap["seconds"] for gap in found), 1),
            "went_into": by_cause(found),
            "gaps": found,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Steps made while peers are killed, stopped and robbed of children."
    )
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--seconds", type=at_least(1), default=600, help="the quiet minute counts")
    parser.add_argument("--quiet", type=at_least(1), default=60, help="seconds left alone at first")
    positive = number_where(lambda value: 0 < value < 1e6, "above 0")
    parser.add_argument(
        "--every", type=positive, default=8.0, help="mean seconds between disturbances"
    )
    parser.add_argument(
        "--gap", type=positive, default=3.0, help="shortest gap without a step that is reported"
    )
    parser.add_argument("--json", type=Path, help="file to write the report to as well")
    options = parser.parse_args()
    if options.seconds <= options.quiet:
        parser.error(f"--seconds {options.seconds} leaves nothing after --quiet {options.quiet}")
    report = trio.run(measure, options)
    if options.json is not None:
        write_json("--json", report, options.json)
    print_json(report)


if __name__ == "__main__":
    main()
