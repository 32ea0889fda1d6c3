"""The library: a scenario from its name to its report. docs/library.md shows a program."""

from pathlib import Path
from typing import Any

from simnet import report as reports
from simnet import scenarios
from simnet.plot import SUFFIXES
from simnet.simulate import replay_command, simulate
from swarm.errors import UserError
from swarm.terminal.output import check_writable


def scenario_names() -> list[str]:
    return scenarios.names()


def run_scenario(
    scenario: str,
    *,
    peers: int | None = None,
    seed: int = 1,
    model_gb: float | None = None,
    plot: str | Path | None = None,
    shows_progress: bool = False,
) -> dict[str, Any]:
    """Run a scenario, by its name or from a TOML file, and return its report.

    The report is what `python -m simnet run --json` writes: `figures`, `network`, `violations`,
    `trace_hash`, … Equal arguments give equal reports, apart from `wall_seconds`, unless this
    process has a node open, too. peers and model_gb replace the scenario's own. plot: where to
    draw it (.png, .svg or .pdf). shows_progress: print a line on stderr every few seconds. Raises
    `UserError`."""
    plot_path = None if plot is None else Path(plot)
    check_writable("plot", plot_path, SUFFIXES)
    if model_gb is not None and not 1e-3 <= model_gb <= 1e5:
        raise UserError(f"a model has between 0.001 and 100000 GB, not {model_gb:g}")
    return simulate(
        scenario,
        peers=peers,
        seed=seed,
        model_bytes=None if model_gb is None else int(model_gb * 1e9),
        shows_progress=shows_progress,
        plot_path=plot_path,
    )


def print_report(report: dict[str, Any]) -> None:
    """Print a report as `python -m simnet run` does."""
    reports.print_report(
        report, replay_command(report["scenario"], report["seed"], peers=report["peers"])
    )
