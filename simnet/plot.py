"""One picture of a simulation: `draw(observations, report, path)`.

It has a panel for broadcast progress per peer, and one for uplink use.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simnet.observations import PROGRESS_PARTS, Broadcast, Observations
from swarm.errors import UserError
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

_Panel = Callable[["Axes"], None]


def draw(observations: Observations, report: dict[str, Any], path: Path) -> None:
    """Write the picture; raises `UserError` if that fails."""
    import matplotlib  # never pyplot, which would take a notebook's backend from it
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = _panels(observations, report)
    style = {
        "font.size": 9.0, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK,
        "xtick.color": INK, "ytick.color": INK, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
        "legend.frameon": False, "legend.fontsize": 8.0, "svg.hashsalt": "simnet",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        picture = Figure(
            figsize=(5.4 * max(1, len(panels)), 4.5),
            dpi=130,
            layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
        )
        picture.suptitle(
            f"{report['scenario']}: {report['peers']:,} peers, seed {report['seed']} — "
            f"{readable_seconds(report['virtual_seconds'])} of virtual time in "
            f"{readable_seconds(report['wall_seconds'])}",
            fontsize=12, fontweight="bold", x=0.01, ha="left",
        )  # fmt: skip
        for number, panel in enumerate(panels):
            panel(picture.add_subplot(1, len(panels), number + 1))
        try:
            picture.savefig(path)
        except OSError as error:
            raise UserError(f"--plot {path} cannot be written ({error.strerror})") from error


def _panels(observations: Observations, report: dict[str, Any]) -> list[_Panel]:
    panels: list[_Panel] = []
    main = observations.main_broadcast()
    if main is not None and main[1].progress:
        (_, step), broadcast = main
        bound = report["figures"].get("bound_seconds")
        panels.append(lambda axes: _progress(axes, observations, step, broadcast, bound))
    if observations.sent_bytes.amounts:
        panels.append(lambda axes: _uplinks(axes, observations))
    return panels


def colour(role: str) -> str:
    return COLOURS.get(role, OTHER_COLOUR)


def _scale(seconds: float) -> tuple[float, str]:
    """(seconds in one unit, the unit's name) for an axis that ends at `seconds`."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def _grid(axes: Axes) -> None:
    axes.grid(color=FAINT, linewidth=0.6, alpha=0.7)
    axes.set_axisbelow(True)


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
    _grid(axes)
    axes.legend(loc="lower right")


def _uplinks(axes: Axes, observations: Observations) -> None:
    buckets = observations.sent_bytes
    width = buckets.width_seconds
    length = max(map(len, buckets.amounts.values()))
    unit, unit_name = _scale(length * width)
    roles = [role for role in observations.names_by_role() if role in buckets.amounts]
    top = [0.0] * (2 * length)
    times = [t for bucket in range(length) for t in (bucket * width / unit,
                                                     (bucket + 1) * width / unit)]  # fmt: skip
    for role in roles:
        row = buckets.amounts[role]
        row = [*row, *[0.0] * (length - len(row))]
        below = top
        top = [
            low + rate
            for low, rate in zip(
                below, (amount * 8e-9 / width for amount in row for _ in (0, 1)), strict=True
            )
        ]
        axes.fill_between(
            times, below, top, color=colour(role), alpha=0.85, linewidth=0, label=role
        )
    took_part = observations.pieces_sent_bytes.keys() | observations.pieces_received_bytes.keys()
    peers = observations.simulation.peers
    lines = [peers[name].plan.line for name in sorted(took_part) if name in peers]
    capacity = 8e-9 * sum(line.uplink_bytes_per_second for line in lines)
    highest = max(max(top), 1e-9)
    if 0 < capacity < 2 * highest:
        axes.axhline(capacity, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label="all uplinks")
        highest = max(highest, capacity)
    axes.set(
        title=f"uplinks in use (of {capacity:,.3g} Gb/s)", xlabel=f"{unit_name} of virtual time",
        ylabel="Gb/s",
    )  # fmt: skip
    first = min(
        bucket for row in buckets.amounts.values() for bucket, amount in enumerate(row) if amount
    )
    axes.set_xlim(first * width / unit, length * width / unit)
    axes.set_ylim(0, 1.35 * highest)  # room for the legend
    _grid(axes)
    axes.legend(loc="upper right", ncols=2)
