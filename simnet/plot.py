"""One picture of a simulation, of how a broadcast reached each peer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from simnet.observations import PROGRESS_PARTS, Broadcast, Observations
from swarm.errors import file_errors
from swarm.terminal.figures import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")

COLOURS = {
    "trainer": "#8e44ad",
    "validator": "#e59c15",
    "relay": "#2c6fbb",
    "inference": "#16a085",
    "bootstrap": "#5f6b76",
    "observer": "#a0785a",
}
OTHER_COLOUR = "#95a5a6"
INK, FAINT = "#2f3b45", "#d5dadd"


def draw(observations: Observations, report: dict[str, Any], path: Path) -> None:
    """Write the picture; raises `UserError` if that fails."""
    import matplotlib  # never pyplot, which would take a notebook's backend from it
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    main = observations.main_broadcast()
    style = {
        "font.size": 9.0, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK,
        "xtick.color": INK, "ytick.color": INK, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
        "legend.frameon": False, "legend.fontsize": 8.0, "svg.hashsalt": "simnet",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        picture = Figure(
            figsize=(7.2, 4.5), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        )
        picture.suptitle(
            f"{report['scenario']}: {report['peers']:,} peers, seed {report['seed']} — "
            f"{readable_seconds(report['virtual_seconds'])} of virtual time in "
            f"{readable_seconds(report['wall_seconds'])}",
            fontsize=12, fontweight="bold", x=0.01, ha="left",
        )  # fmt: skip
        if main is not None and main[1].progress:
            (_, step), broadcast = main
            bound = report["figures"].get("bound_seconds")
            _progress(picture.add_subplot(), observations, step, broadcast, bound)
        with file_errors(f"--plot {path}", "written"):
            picture.savefig(path)


def colour(role: str) -> str:
    return COLOURS.get(role, OTHER_COLOUR)


def _scale(seconds: float) -> tuple[float, str]:
    """(seconds in one unit, the unit's name) for an axis that ends at `seconds`."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def _progress(
    axes: Axes, observations: Observations, step: int, broadcast: Broadcast, bound: float | None
) -> None:
    ends = [times[-1] - broadcast.published for times in broadcast.progress.values() if times]
    unit, unit_name = _scale(max([*ends, bound or 0.0]))
    curves = {
        name: [(time - broadcast.published) / unit for time in times]
        for name, times in broadcast.progress.items()
    }
    shares = [100.0 * part / PROGRESS_PARTS for part in range(PROGRESS_PARTS + 1)]
    shown: set[str] = set()
    width = 1.4 if len(curves) <= 30 else 0.7
    # Workers first, so that the few other peers are drawn on top.
    for role, names in reversed(observations.names_by_role().items()):
        for name in names:
            if name in curves:
                axes.plot(
                    [0.0, *curves[name]], shares[: len(curves[name]) + 1], color=colour(role),
                    linewidth=width, alpha=0.75, label=None if role in shown else role,
                )  # fmt: skip
                shown.add(role)
    if bound is not None:
        axes.axvline(bound / unit, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.annotate(
            "bound", (bound / unit, 92), xytext=(-4, 0), textcoords="offset points", ha="right",
        )  # fmt: skip
    axes.set(
        title=f"policy {step} arrives ({readable_bytes(broadcast.total_bytes)})",
        xlabel=f"{unit_name} since it was published", ylabel="% received", ylim=(0, 101),
    )  # fmt: skip
    axes.set_xlim(left=0)
    axes.grid(color=FAINT, linewidth=0.6, alpha=0.7)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right")
