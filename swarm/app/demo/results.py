"""The results of a demo: the trained policy, the reward curve, the summary."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import trio

from swarm.app.demo.options import DemoOptions
from swarm.app.demo.state import SwarmState
from swarm.app.demo.summary import draw_rewards, seconds_by_phase, summarise
from swarm.app.output import write_json

OUTPUT = Path("demo-output")
"""Default folder of the results."""


def write_results(state: SwarmState, options: DemoOptions) -> dict[str, Any]:
    """Write the results to their folder; returns the summary."""
    output = options.keep or OUTPUT
    output.mkdir(parents=True, exist_ok=True)
    policy = output / "policy"
    if state.finished_folder:
        shutil.rmtree(policy, ignore_errors=True)
        shutil.copytree(state.finished_folder, policy)
    summary = summarise(
        state,
        trio.current_time(),
        seed=options.seed,
        policy_folder=str(policy) if policy.exists() else None,
    )
    draw_rewards(summary, output / "reward.png")
    summary["seconds"] = round(trio.current_time() - state.started, 2)
    summary["seconds_by_phase"] = seconds_by_phase(state, trio.current_time())
    write_json("--keep", summary, output / "summary.json")
    if options.json_file is not None:
        write_json("--json", summary, options.json_file)
    return summary
