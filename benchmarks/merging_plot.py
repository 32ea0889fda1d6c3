"""Draws what `benchmarks.merging` printed: each arm's accuracy on both tasks, with its range.

python -m benchmarks.merging_plot merging.json merging.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from simnet.plot import SUFFIXES
from swarm.errors import UserError
from swarm.terminal.output import check_writable


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("report", type=Path, help="what benchmarks.merging printed")
    parser.add_argument("picture", type=Path, help=" or ".join(SUFFIXES))
    given = parser.parse_args()
    try:
        runs = json.loads(given.report.read_bytes())["seeds"]
        check_writable("picture", given.picture, SUFFIXES)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(
            f"{given.report} cannot be read ({error}); give what benchmarks.merging printed"
        )
    except UserError as error:
        parser.error(str(error))
    import matplotlib  # imported late: only needed for a picture

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms, tasks = list(runs[0]), [task for task in runs[0]["base"] if task != "mean"]
    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    for index, task in enumerate(tasks):
        places = [place + (index - 0.5) * 0.38 for place in range(len(arms))]
        values = [[run[arm][task] for run in runs] for arm in arms]
        medians = [statistics.median(each) for each in values]
        reach = [
            [median - min(each) for median, each in zip(medians, values, strict=True)],
            [max(each) - median for median, each in zip(medians, values, strict=True)],
        ]
        axis.bar(places, medians, 0.38, yerr=reach, label=task, capsize=2)
    axis.set_xticks(range(len(arms)), [arm.replace(", ", "\n") for arm in arms], fontsize=8)
    axis.set_ylabel("sampled accuracy")
    axis.set_ylim(0, 1)
    axis.legend()
    figure.tight_layout()
    figure.savefig(given.picture, dpi=110)


if __name__ == "__main__":
    main()
