"""Draws what a study printed: each variant's curve over the steps, with a band over its seeds.

    python -m benchmarks.clipping --seeds 5 --steps 250 > clipping.json
    python -m benchmarks.study_plot clipping.json clipping.png

There is one panel per group of variants in the report.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simnet.plot import SUFFIXES
from swarm.errors import UserError
from swarm.terminal.output import check_writable


def curves(report: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, Any]]:
    """(panel, variant, its `benchmarks.study.band`) for each curve in a study's report."""
    for key, value in report.items():
        if key == "curve":
            *panel, variant = path or ("",)
            yield " ".join(panel), variant, value
        elif isinstance(value, dict):
            yield from curves(value, (*path, key))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("report", type=Path, help="what a study printed")
    parser.add_argument("picture", type=Path, help=" or ".join(SUFFIXES))
    parser.add_argument("--ylabel", default="task reward")
    given = parser.parse_args()
    panels: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    try:
        report = json.loads(given.report.read_bytes())
        check_writable("picture", given.picture, SUFFIXES)
    except OSError as error:
        parser.error(f"{given.report} cannot be read ({error.strerror})")
    except ValueError as error:
        parser.error(f"{given.report} is not JSON ({error}); give what a study printed")
    except UserError as error:
        parser.error(str(error))
    for panel, variant, band in curves(report if isinstance(report, dict) else {}):
        panels[panel].append((variant, band))
    if not panels:
        parser.error(f"{given.report} holds no curve; give what a study printed")
    import matplotlib  # imported late: only needed for a picture

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (6 * len(panels), 4)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    for axis, (panel, variants) in zip(axes[0], panels.items(), strict=True):
        for variant, band in variants:
            (line,) = axis.plot(band["step"], band["mean"], label=variant.replace("_", " "))
            axis.fill_between(
                band["step"], band["low"], band["high"], color=line.get_color(), alpha=0.12
            )
        axis.set_title(panel.replace("_", " "))
        axis.set_xlabel("step")
        if len(variants) > 1:
            axis.legend()
    axes[0][0].set_ylabel(given.ylabel)
    figure.tight_layout()
    figure.savefig(given.picture, dpi=80)


if __name__ == "__main__":
    main()
