"""The learning curves of several runs of `benchmarks.recipe`, by environment, over their seeds.

    python -m benchmarks.recipe --environment tools --seeds 5 > tools.json
    python -m benchmarks.recipe_curves tools.json mixture-0.json mixture-1.json > curves.json
    python -m benchmarks.study_plot curves.json curves.png

Prints one JSON object: for each environment the seeds, each accuracy as median, least and most,
and the curve of the mean reward with its least and most.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.study import band
from swarm.terminal.output import print_json

FIGURES = tuple(
    f"{kind}_accuracy_{moment}" for kind in ("sampled", "greedy") for moment in ("before", "after")
)


class Run(msgspec.Struct):
    """What `benchmarks.recipe` prints about one seed."""

    seed: int
    sampled_accuracy_before: float
    sampled_accuracy_after: float
    greedy_accuracy_before: float
    greedy_accuracy_after: float
    reward_by_tenth: list[float]
    cpu_seconds: float


class Report(msgspec.Struct):
    """What `benchmarks.recipe` prints."""

    environment: str
    steps: int
    runs: list[Run]


def summary(steps: int, runs: Sequence[Run]) -> dict[str, Any]:
    """Figures and curve of one environment."""
    curve = band([run.reward_by_tenth for run in runs])
    points = len(runs[0].reward_by_tenth)
    curve["step"] = [(point + 0.5) * steps / points for point in curve["step"]]
    return {
        "steps": steps,
        "seeds": sorted(run.seed for run in runs),
        **{name: _spread([getattr(run, name) for run in runs]) for name in FIGURES},
        "cpu_seconds": _spread([run.cpu_seconds for run in runs]),
        "curve": curve,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("reports", type=Path, nargs="+", help="what benchmarks.recipe printed")
    given = parser.parse_args()
    found: dict[str, list[Run]] = defaultdict(list)
    steps: dict[str, int] = {}
    for path in given.reports:
        try:
            report = msgspec.json.decode(path.read_bytes(), type=Report)
        except OSError as error:
            parser.error(f"{path} cannot be read ({error.strerror})")
        except msgspec.MsgspecError as error:
            parser.error(f"{path} is no report ({error}); give what benchmarks.recipe printed")
        if steps.setdefault(report.environment, report.steps) != report.steps:
            parser.error(
                f"{path} has {report.steps} steps, an earlier report of {report.environment} has "
                f"{steps[report.environment]}; give reports of equally many"
            )
        found[report.environment] += report.runs
    print_json({name: summary(steps[name], runs) for name, runs in found.items()})


if __name__ == "__main__":
    main()
