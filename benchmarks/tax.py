"""The swarm tax: what the demo costs beyond the same recipe in one process.

    python -m benchmarks.tax --steps 250
    python -m benchmarks.tax --steps 40 --model SmolLM2-135M-Instruct --processor 0

Runs `benchmarks.recipe` and the whole demo one after the other, with the same steps and seed, and
prints one JSON object: CPU seconds of all processes of each side (user and system, from the start
of its command to the end of its last process, as the kernel counts them for ended processes), their
ratio, and where they went: per process, and per activity of the demo and of the recipe. Activities
come from stacks sampled in every process, each 20 ms of its CPU time (`benchmarks.cpu_samples`); a
stack counts for its innermost frame that a rule below knows.

CPU seconds depend on what else the machine does (shared caches and cores), so compare only the two
sides of one run. Where two processors share a core or its memory, a demo whose processes run beside
each other takes more of them for the same work than a recipe that runs alone: `--processor` holds
both sides to one, so that neither slows itself down.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import at_least, load_average, spread
from benchmarks.cpu_samples import Samples, activity, read_samples, sampled_environment
from peers.demo.recipes import OF_MODEL
from swarm.terminal.output import print_json

_PR_SET_CHILD_SUBREAPER = 36

REST = "interpreter start and end, not sampled"
LOOP = "event loops"
OTHER = "all else"

RULES = {
    "<frozen importlib": "imports",
    "peers/proofs": "proofs and noise",
    "engines/noise.py": "proofs and noise",
    "rollouts/submission_file.py": "Parquet",
    "peers/demo/warmup.py": "warm-up (SFT)",
    "peers/evaluation/service.py": "evaluation",
    "peers/validator/prefill.py": "prefill check",
    "peers/validator/recompute.py": "prefill check",
    "peers/validator/inspector.py": "exact checks and rewards",
    "peers/validator/reader.py": "exact checks and rewards",
    "peers/environments": "environments",
    "engines/episodes.py": "generation",
    "peers/engines/": "generation",
    "peers/learning/durable.py": "saving and exporting",
    "peers/learning/states.py": "saving and exporting",
    "engines/model.py:save": "saving and exporting",
    "peers/learning": "training",
    "peers/trainer/service.py": "training",
    "benchmarks/": "recipe",
    "swarm/world/disk.py": "disk (files, fsync, SQLite)",
    "swarm/events.py": "events as JSON",
    "peers/demo": "demo's view",
    "swarm/gossip": "gossip",
    "swarm/wire/envelope.py": "signatures",
    "swarm/wire/identity.py": "signatures",
    "swarm/ledger": "ledger",
    "swarm/kademlia": "DHT",
    "swarm/transport/http": "transfer (HTTP)",
    "swarm/shardcast": "transfer (pieces)",
    "swarm/transport": "streams (libp2p)",
    "/libp2p/": "streams (libp2p)",
    "swarm/wire/messenger.py": "streams (libp2p)",
    "swarm/world": "calls of children",
    "swarm/node": "node and run",
    "swarm/run": "node and run",
    "peers/validator": "validator role",
    "peers/trainer": "trainer role",
    "peers/inference": "inference role",
    "peers/": "other roles",
    "trio/_core/_run.py:unrolled_run": LOOP,
    "trio/_core/_run.py:run": LOOP,
    "trio/_core/_thread_cache.py": "threads",
    "swarm/commands": "start of commands",
    "swarm/peer.py": "start of commands",
}
"""Activity by a part of `path:function`; the first part that a frame contains counts."""


@dataclass(frozen=True)
class Side:
    """What one command and all processes below it cost."""

    cpu_seconds: float
    processes: dict[str, float]
    activities: dict[str, float]


def measure(command: Sequence[str], folder: Path, logs: Path | None = None) -> Side:
    """Run a command to its end; `logs` is the demo's folder of logs, which names its children.

    Waits for all children of this process, also those that others started.
    """
    folder.mkdir()
    # Processes that lose their parent become this process's children, so that none goes uncounted.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = sampled_environment(folder)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles all modules
    status = subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, check=False
    ).returncode
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return sum_up(read_samples(folder), _children(logs) if logs else {}, total)


def sum_up(samples: Sequence[Samples], children: dict[int, str], total: float) -> Side:
    """The tables of one side. `children`: names of forked processes by pid."""
    processes: defaultdict[str, float] = defaultdict(float)
    activities: defaultdict[str, float] = defaultdict(float)
    for process in samples:
        name = children.get(process.pid) or _name(process.command)
        for seconds, frames in process.stacks:
            doing = activity(frames, RULES, OTHER)
            processes[name] += seconds
            activities[doing] += seconds
    rest = total - sum(processes.values())
    processes[REST] += rest
    activities[REST] += rest
    return Side(cpu_seconds=total, processes=_table(processes), activities=_table(activities))


def _table(spent: Mapping[str, float]) -> dict[str, float]:
    most = sorted(spent.items(), key=lambda item: -item[1])
    return {name: round(seconds, 2) for name, seconds in most if seconds >= 0.01}


def _children(logs: Path) -> dict[int, str]:
    """Names of compute children by pid, from the events of their peers."""
    names = {}
    for log in logs.glob("*.jsonl"):
        for line in log.read_text(errors="replace").splitlines():
            if '"compute.child_started"' in line:
                event = json.loads(line)
                names[event["pid"]] = f"{log.stem}/{event['name']}"
    return names


def _name(command: str) -> str:
    home = re.search(r"/peers/([\w-]+)(?: |$)", command)
    if home is not None:
        return home[1]
    return "fork servers" if "swarm.world.fork_server" in command else "command"


def idle_share(log: Path) -> float:
    """Share of the time since the first step in which the trainer waited for rollouts, checks or
    weights, from its events."""
    lines = log.read_text(errors="replace").splitlines()
    steps = [json.loads(line) for line in lines if '"trainer.step_trained"' in line][1:]
    whole = sum(step["step_seconds"] for step in steps)
    return sum(step["idle_seconds"] for step in steps) / whole if whole else 0.0


def run_once(steps: int, seed: int, model: Path | None, folder: Path) -> tuple[Side, Side, float]:
    """Measure the recipe, then the demo; also returns the share of its trainer's idle time."""
    python = sys.executable
    given = [] if model is None else [f"--model={model}"]
    recipe = [python, "-m", "benchmarks.recipe", "--seeds", "1", "--first-seed", str(seed)]
    recipe += given and [*given, f"--prompts={OF_MODEL.held_out}"]
    one = measure([*recipe, "--steps", str(steps)], folder / "recipe")
    kept = folder / "kept"
    demo = [str(Path(python).parent / "swarm"), "demo", "--plain", "--seed", str(seed)]
    demo += [*given, "--steps", str(steps), "--out", str(kept)]
    swarm = measure(demo, folder / "demo", kept / "logs")
    return one, swarm, idle_share(kept / "logs" / "trainer.jsonl")


def report(rounds: Sequence[tuple[Side, Side, float]]) -> dict[str, Any]:
    """Ratios and seconds over all rounds, and the tables of the last one."""
    recipe, demo, _ = rounds[-1]
    names = dict.fromkeys([*demo.activities, *recipe.activities])
    return {
        **spread("tax", [swarm.cpu_seconds / one.cpu_seconds for one, swarm, _ in rounds], 2),
        **spread("demo_cpu_seconds", [swarm.cpu_seconds for _, swarm, _ in rounds], 1),
        **spread("recipe_cpu_seconds", [one.cpu_seconds for one, _, _ in rounds], 1),
        **spread("trainer_idle_share", [idle for _, _, idle in rounds], 3),
        "processes": demo.processes,
        "activities": {
            name: [demo.activities.get(name, 0.0), recipe.activities.get(name, 0.0)]
            for name in names
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=at_least(1), default=250)
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--model", type=Path, help="folder of a model, instead of a small one")
    parser.add_argument("--rounds", type=at_least(1), default=1)
    parser.add_argument("--processor", type=at_least(0), help="the only one that both sides use")
    arguments = parser.parse_args()
    if arguments.processor is not None:
        os.sched_setaffinity(0, {arguments.processor})
    rounds = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="swarm-tax-") as name:
            rounds.append(run_once(arguments.steps, arguments.seed, arguments.model, Path(name)))
    head = {"steps": arguments.steps, "seed": arguments.seed, "processor": arguments.processor}
    head["load_average"] = load_average()
    print_json({**head, **report(rounds)})


if __name__ == "__main__":
    main()
