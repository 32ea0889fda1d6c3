"""Policies of two tasks merged by every method, and how well each does both tasks.

    python -m benchmarks.recipe --model SMOLLM2 --environment sort-digits --keep sort
    python -m benchmarks.recipe --model SMOLLM2 --environment calculator --keep calculate
    python -m benchmarks.merging --base SMOLLM2 --policy sort-digits=sort/0/40 \
        --policy calculator=calculate/0/40

Prints one JSON object, and each row on standard error as it is measured: sampled and greedy
accuracy on `--prompts` held-out prompts of each task, of the base, of both policies, and of their
merges with equal weights. The same prompts for all. With three seeds (`--seeds 3` above), run it
once for each: `sort/1/40`, `sort/2/40`. Needs `pip install 'swarm-rl[merge]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trio

from benchmarks.common import at_least, several
from peers.demo.recipes import RECIPES, recipe_of
from peers.evaluation.run import accuracies
from peers.merging.merge import Method, Recipe, merge
from swarm.terminal.output import print_json
from swarm.world.compute import LocalCompute

METHODS = [each for each in Method if each is not Method.dare_ties]


def policy(text: str) -> tuple[str, Path]:
    """Reader of TASK=FOLDER."""
    task, _, folder = text.partition("=")
    if task not in RECIPES or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no TASK=FOLDER with one of {', '.join(RECIPES)} and a folder that exists"
        )
    return task, Path(folder).absolute()


def method(text: str) -> Method:
    """Reader of a method."""
    if text not in METHODS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(METHODS)}")
    return Method(text)


def measure(folder: Path, tasks: Sequence[str], base: Path, prompts: int) -> dict[str, Any]:
    """Accuracies of one policy in all tasks."""
    found = {}
    for task in tasks:
        recipe = recipe_of(task, model=base)
        given = (LocalCompute(), folder, recipe.environments, recipe.sampling, prompts)
        told = trio.run(accuracies, *given)
        found[task] = {"sampled": round(told.sampled, 4), "greedy": round(told.greedy, 4)}
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", type=Path, required=True, help="folder both were trained from")
    parser.add_argument("--policy", type=policy, action="append", required=True)
    parser.add_argument("--methods", type=several(method), default=METHODS)
    parser.add_argument("--density", type=float, default=0.5)
    parser.add_argument("--prompts", type=at_least(1), default=256, help="held-out, of each task")
    options = parser.parse_args(given)
    if len(options.policy) != 2:
        parser.error(f"--policy is given {len(options.policy)} times; give it twice")
    torch.set_num_threads(1)
    base, tasks = options.base.absolute(), [task for task, _ in options.policy]
    folders = [folder for _, folder in options.policy]
    rows: list[dict[str, Any]] = []

    def add(name: str, folder: Path, seconds: float = 0.0) -> None:
        accuracy = measure(folder, tasks, base, options.prompts)
        both = sum(each["sampled"] for each in accuracy.values()) / len(tasks)
        rows.append({"policy": name, **accuracy, "both": round(both, 4)})
        if seconds:
            rows[-1]["merge_cpu_seconds"] = round(seconds, 1)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    add("base", base)
    for task, folder in options.policy:
        add(task, folder)
    for each in options.methods:
        with tempfile.TemporaryDirectory() as name:
            merged, began = Path(name) / "merged", time.process_time()
            needed = base if each.needs_base else None
            merge(Recipe(folders, (), each, needed, options.density), merged, lambda *_: None)
            add(each, merged, time.process_time() - began)
    print_json({"prompts": options.prompts, "density": options.density, "rows": rows})


if __name__ == "__main__":
    main()
