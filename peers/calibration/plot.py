"""ROC curves: the share of each cheat's submissions refused, by that of honest ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from peers.calibration.thresholds import Assessment


def roc(honest: list[float], attack: list[float]) -> tuple[list[float], list[float]]:
    """False and true positive rates, for every limit on a score."""
    limits = sorted({*honest, *attack}, reverse=True)
    false = [float(np.mean([score >= limit for score in honest])) for limit in limits]
    true = [float(np.mean([score >= limit for score in attack])) for limit in limits]
    return [0.0, *false, 1.0], [0.0, *true, 1.0]


def area(honest: list[float], attack: list[float]) -> float:
    """Area under the ROC curve: the probability that a cheat's submission scores higher."""
    wins = [(a > h) + (a == h) / 2 for a in attack for h in honest]
    return float(np.mean(wins))


def draw_roc(
    honest: Mapping[str, Assessment], attacks: Mapping[str, Assessment], path: Path
) -> None:
    """Draw the curves of all attacks as a PNG. Imports matplotlib, which takes a second.

    The score of a submission is the largest log10 of its pooled e-values.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    scores = [score for each in honest.values() for score in each.bans]
    drawing = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = drawing.add_subplot()
    for name, each in attacks.items():
        label = f"{name} ({area(scores, each.bans):.3f})"
        axes.step(*roc(scores, each.bans), where="post", label=label, linewidth=1.4)
    axes.set_xscale("symlog", linthresh=1 / len(scores))
    axes.set(
        xlabel=f"share of {len(scores)} honest submissions with as high a score",
        ylabel="share of the cheat's submissions",
        xlim=(0, 1),
        ylim=(0, 1.02),
    )
    axes.set_title("one submission's evidence; in brackets: area under the curve")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path)
