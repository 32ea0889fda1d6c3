"""The commands of `python -m simnet`: run and list scenarios, run many seeds.

python -m simnet run join --peers 50 --seed 1 --json join.json"""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from simnet import scenarios
from simnet.clock import Deadlock
from simnet.library import run_scenario
from simnet.report import print_report
from simnet.simulate import replay_command, run_campaign
from swarm.errors import SwarmError
from swarm.terminal.exit import exit_with
from swarm.terminal.options import explained
from swarm.terminal.output import STANDARD_OUTPUT, check_writable, write_json

command = typer.Typer(
    help="Play whole swarms in virtual time, on this machine.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@command.command("list")
def list_scenarios() -> None:
    """Show the scenarios there are."""
    width = max(map(len, scenarios.names())) + 2
    for name in scenarios.names():
        scenario = scenarios.load(name)
        print(f"{name:{width}}{scenario.about} ({scenario.peers} peers)")


@command.command()
@explained(__file__)
def run(
    scenario: str,
    peers: int | None = None,
    seed: int = 1,
    model_gb: float | None = None,
    json_path: Path | None = None,
    plot_path: Path | None = None,
) -> None:
    """Run a scenario; the exit status is 1 if an invariant was violated."""
    replay = replay_command(scenario, seed, peers=peers, model_gb=model_gb)
    with _mistakes():
        check_writable("--json", json_path)
        try:
            report = run_scenario(
                scenario,
                peers=peers,
                seed=seed,
                model_gb=model_gb,
                plot=plot_path,
                shows_progress=True,
            )
        except Deadlock as error:
            raise Deadlock(f"{error}\nseed {seed}; replay: {replay}") from error
        if json_path is not None:
            write_json("--json", report, json_path)
    console = Console(stderr=json_path == STANDARD_OUTPUT, highlight=False)
    print_report(report, replay, console)
    for what, path in (("plot", plot_path), ("report", json_path)):
        if path is not None and path != STANDARD_OUTPUT:
            _say(json_path, f"{what} written to {path}")
    raise typer.Exit(1 if report["violations"] else 0)


@command.command("swarm-of-seeds")
@explained(__file__)
def swarm_of_seeds(
    scenario: str,
    seeds: int = 100,
    first: int = 1,
    jobs: int = 1,
    peers: int | None = None,
    json_path: Path | None = None,
) -> None:
    """Run many seeds; the exit status is 1 if any failed, 130 after Ctrl-C."""
    with _mistakes():
        check_writable("--json", json_path)
        scenarios.load(scenario)
    campaign = run_campaign(scenario, seeds=range(first, first + seeds), peers=peers, jobs=jobs)
    word = "interrupted after " if campaign.interrupted else ""
    _say(
        json_path,
        f"{scenario}: {word}{campaign.done:,} seeds, {len(campaign.failed)} failed, "
        f"{campaign.virtual_seconds / 3600:.1f} h of virtual time in {campaign.wall_seconds:.0f} s",
    )
    if json_path is not None:
        with _mistakes():
            write_json("--json", dataclasses.asdict(campaign), json_path)
    if campaign.interrupted:
        raise typer.Exit(130)
    raise typer.Exit(1 if campaign.failed else 0)


@contextmanager
def _mistakes() -> Iterator[None]:
    """Turn an expected error into one sentence and an exit status other than 0."""
    try:
        yield
    except SwarmError as error:
        raise typer.Exit(exit_with(error)) from error


def _say(json_path: Path | None, line: str) -> None:
    print(line, file=sys.stderr if json_path == STANDARD_OUTPUT else sys.stdout)
