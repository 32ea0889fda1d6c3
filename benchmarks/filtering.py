"""Offline and online filters, on and off: what a generated rollout is worth.

    python -m benchmarks.filtering --seeds 5 --budget 32000

Prints one JSON object. Every variant may generate the same number of completions. Offline: tasks
come from a pool of tasks that the base policy solves in 12.5 % to 50 % of 8 attempts, instead of an
unfiltered pool of the same size (the filter's attempts are reported, but not counted). Online:
every batch is refilled until all its groups have a spread of rewards; without the filter the step
trains on the groups that have one.
`gain_per_1000` is the held-out sampled accuracy gained per 1,000 completions generated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import trio
from msgspec.structs import asdict, replace

from benchmarks.study import Variant, learn
from peers.dataset.service import DatasetService
from peers.demo.recipes import ENVIRONMENT, OPTIMISER, SAMPLING, SCHEDULE
from peers.environments import load as load_environment
from peers.environments.listed import Listed
from peers.trainer.warmup import prepare_base
from swarm.jobs.offline import FilterSetup, MeasureTasks
from swarm.terminal.output import print_json

ATTEMPTS = 8
KEEP = (0.125, 0.5)


def write_pools(base: Path, folder: Path, tasks: int, seed: int) -> dict[str, Path]:
    """Write files of tasks like `swarm dataset filter`: the kept tasks, and as many unfiltered."""
    job = MeasureTasks(
        seed=seed,
        first=0,
        count=tasks,
        attempts=ATTEMPTS,
        temperature=SAMPLING.temperature,
        max_new_tokens=SAMPLING.max_new_tokens,
        stop_ids=SAMPLING.stop_ids,
    )
    service = DatasetService(
        FilterSetup(policy=str(base), environment="sort-digits", version="1", options={})
    )
    rows = trio.run(service.measure, job).rows
    kept = [row for row in rows if KEEP[0] <= row.passes / ATTEMPTS <= KEEP[1]]
    pools = {"offline": kept, "any": rows[: len(kept)]}
    paths = {}
    for name, some in pools.items():
        paths[name] = folder / f"{name}-{seed}.jsonl"
        lines = ["{}", *(json.dumps({**asdict(row), "kept": True}) for row in some)]
        paths[name].write_text("\n".join(lines) + "\n")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2, help="how many seeds, from 0")
    parser.add_argument("--budget", type=int, default=16_000, help="completions a variant makes")
    parser.add_argument("--tasks", type=int, default=1024, help="tasks tried by the offline filter")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        **vars(given),
        "attempts_of_the_offline_filter": given.tasks * ATTEMPTS,
        "variants": {},
    }
    steps = given.budget // (SCHEDULE.groups_per_step * SAMPLING.group_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = []
        pools = []
        for seed in range(given.seeds):
            before.append(prepare_base(folder / str(seed), seed).sampled)
            pools.append(write_pools(folder / str(seed), folder, given.tasks, seed))
        for offline in (False, True):
            for online in (False, True):
                gains, rewards, made = [], [], []
                for seed in range(given.seeds):
                    environment = Listed(
                        load_environment(ENVIRONMENT.name, ENVIRONMENT.version),
                        pools[seed]["offline" if offline else "any"],
                        "pool",
                    )
                    variant = Variant(
                        optimiser=replace(OPTIMISER, final_learning_rate_share=1.0),
                        steps=steps,
                        refill=online,
                    )
                    curve = learn(
                        folder / str(seed),
                        seed,
                        variant,
                        environment=environment,
                        generated_max=given.budget,
                    )
                    gained = curve.held_out - before[seed]
                    gains.append(1000 * gained / curve.generated[-1])
                    rewards.append(curve.held_out)
                    made.append(curve.generated[-1])
                result["variants"][f"offline {offline}, online {online}"] = {
                    "gain_per_1000": round(statistics.fmean(gains), 5),
                    "held_out_accuracy_after": round(statistics.fmean(rewards), 4),
                    "completions_generated": round(statistics.fmean(made)),
                }
        result["held_out_accuracy_before"] = round(statistics.fmean(before), 4)
    print_json(result)


if __name__ == "__main__":
    main()
