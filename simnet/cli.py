"""The commands of `python -m simnet`: run and list scenarios, plan a network, run many seeds.

python -m simnet run join --peers 50 --seed 1 --json join.json
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from simnet import plan as planning
from simnet import scenarios
from simnet.campaign import minimise_seed, run_campaign
from simnet.clock import Deadlock
from simnet.faults import read as read_schedule
from simnet.planted import check_plant
from simnet.plot import SUFFIXES as PLOT_SUFFIXES
from simnet.report import print_report
from simnet.simulate import simulate
from simnet.watch import Watch
from swarm.app.output import STANDARD_OUTPUT, check_writable, write_json
from swarm.errors import SwarmError, UserError

Json = Annotated[
    Path | None,
    typer.Option("--json", help="File for the result; - prints it, the text on stderr."),
]

command = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@command.command("list")
def list_scenarios() -> None:
    """Show the scenarios there are."""
    width = max(map(len, scenarios.names())) + 2
    for name in scenarios.names():
        scenario = scenarios.load(name)
        print(f"{name:{width}}{scenario.about} ({scenario.peers} peers)")


@command.command()
def run(
    scenario: Annotated[str, typer.Argument(help="Its name (python -m simnet list).")],
    peers: Annotated[int | None, typer.Option(help="How many peers.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 1,
    model_gb: Annotated[float | None, typer.Option(help="Size of a checkpoint.")] = None,
    json_path: Json = None,
    faults_path: Annotated[
        Path | None, typer.Option("--faults", help="Fault schedule, in TOML.")
    ] = None,
    plant: Annotated[
        str | None, typer.Option(help="Plant a bug that the invariants must find.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw it here (.png, .svg or .pdf).")
    ] = None,
) -> None:
    """Run a scenario; the exit status is 1 if an invariant was violated, 130 after Ctrl-C."""
    replay = f"python -m simnet run {scenario} --seed {seed}"
    replay += "" if peers is None else f" --peers {peers}"
    replay += "" if model_gb is None else f" --model-gb {model_gb:g}"
    replay += "" if faults_path is None else f" --faults {faults_path}"
    replay += "" if plant is None else f" --plant {plant}"
    try:
        check_writable("--json", json_path)
        check_writable("--plot", plot_path, PLOT_SUFFIXES)
        if model_gb is not None and not 1e-3 <= model_gb <= 1e5:
            raise UserError(f"--model-gb must lie between 0.001 and 100000, not {model_gb:g}")
        report = simulate(
            scenario,
            peers=peers,
            seed=seed,
            model_bytes=None if model_gb is None else int(model_gb * 1e9),
            faults=None if faults_path is None else read_schedule(faults_path),
            plant=plant,
            watch=Watch(show=True),
            plot_path=plot_path,
        )
        if json_path is not None:
            write_json("--json", report, json_path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except Deadlock as error:
        print(f"error: {error}\nseed {seed}; replay: {replay}", file=sys.stderr)
        raise typer.Exit(1) from error
    except SwarmError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print_report(report, replay, _console(json_path))
    for what, path in (("plot", plot_path), ("report", json_path)):
        if path is not None and path != STANDARD_OUTPUT:
            _say(json_path, f"{what} written to {path}")
    if report.get("interrupted"):
        raise typer.Exit(130)
    raise typer.Exit(1 if report["violations"] else 0)


@command.command()
def plan(
    model_gb: Annotated[float, typer.Option(help="Size of a checkpoint.")] = 62.0,
    inference: Annotated[int, typer.Option(help="How many inference peers.")] = 200,
    relays: Annotated[int, typer.Option(help="How many relays.")] = 4,
    uplink_mbps: Annotated[
        float, typer.Option("--uplink-mbps", "--uplink", help="Of an inference peer, in Mb/s.")
    ] = 200.0,
    downlink_mbps: Annotated[
        float,
        typer.Option(
            "--downlink-mbps", "--downlink", help="Of the slowest inference peer, in Mb/s."
        ),
    ] = 500.0,
    relay_uplink_mbps: Annotated[
        float, typer.Option("--relay-uplink-mbps", "--relay-uplink", help="Of a relay, in Mb/s.")
    ] = 10_000.0,
    trainer_uplink_mbps: Annotated[
        float,
        typer.Option("--trainer-uplink-mbps", "--trainer-uplink", help="Of the trainer, in Mb/s."),
    ] = 1000.0,
    step_minutes: Annotated[
        float | None, typer.Option(help="Minutes that the trainer needs for a step.")
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Generated by one inference peer.")
    ] = None,
    batch_completions: Annotated[int, typer.Option(help="Completions a step trains on.")] = 4096,
    completion_tokens: Annotated[float, typer.Option(help="Tokens of one, on average.")] = 2500.0,
    asynchrony: Annotated[int, typer.Option(help="Steps that rollouts may be behind.")] = 2,
    simulated: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Also simulate a small broadcast.")
    ] = True,
    json_path: Json = None,
) -> None:
    """Estimate broadcast time, relays needed, and the trainer's idle share."""
    network = planning.Network(
        model_gb, inference, relays, uplink_mbps, downlink_mbps, relay_uplink_mbps,
        trainer_uplink_mbps,
    )  # fmt: skip
    with _mistakes():
        check_writable("--json", json_path)
        planning.check(
            network, step_minutes=step_minutes, tokens_per_second=tokens_per_second,
            batch_completions=batch_completions, completion_tokens=completion_tokens,
        )  # fmt: skip
        if not 0 <= asynchrony <= 64:
            raise UserError(f"--asynchrony must lie between 0 and 64, not {asynchrony}")
        batch_minutes = None
        if tokens_per_second is not None:
            tokens = batch_completions * completion_tokens
            batch_minutes = tokens / (inference * tokens_per_second) / 60
        if simulated:
            print("simulating (half a minute; --no-simulate leaves it out)…", file=sys.stderr)
        found = planning.make_plan(
            network, step_minutes=step_minutes, batch_minutes=batch_minutes,
            asynchrony=asynchrony, simulated=simulated,
        )  # fmt: skip
        if json_path is not None:
            write_json("--json", found, json_path)
    planning.print_plan(network, found, _console(json_path))


@command.command("swarm-of-seeds")
def swarm_of_seeds(
    scenario: Annotated[str, typer.Option(help="Its name (python -m simnet list).")],
    seeds: Annotated[int, typer.Option(min=1, help="How many, from --first on.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 1,
    peers: Annotated[int | None, typer.Option(help="How many peers.")] = None,
    plant: Annotated[
        str | None, typer.Option(help="Plant a bug that the invariants must find.")
    ] = None,
    minimise: Annotated[bool, typer.Option(help="Make the first failing schedule small.")] = True,
    json_path: Json = None,
) -> None:
    """Run many seeds; the exit status is 1 if any failed, 130 after Ctrl-C."""
    with _mistakes():
        check_writable("--json", json_path)
        scenarios.load(scenario)
        check_plant(plant)
    campaign = run_campaign(
        scenario, seeds=range(first, first + seeds), peers=peers, plant=plant, jobs=jobs
    )
    small = ""
    named = next((result for result in campaign.failed if result.schedule), None)
    if named is not None and minimise and not campaign.interrupted:
        print(f"seed {named.seed}: making its schedule of faults smaller", file=sys.stderr)
        small = minimise_seed(campaign, named)
        path = Path(f"faults-{scenario}-{named.seed}.toml")
        path.write_text(small, encoding="utf-8")
        _say(json_path, f"{small}\nreplay: {campaign.replay(named.seed, faults=str(path))}")
    word = "interrupted after " if campaign.interrupted else ""
    _say(
        json_path,
        f"{scenario}: {word}{campaign.done:,} seeds, {len(campaign.failed)} failed, "
        f"{campaign.virtual_seconds / 3600:.1f} h of virtual time in {campaign.wall_seconds:.0f} s",
    )
    if json_path is not None:
        with _mistakes():
            write_json("--json", {**dataclasses.asdict(campaign), "minimised": small}, json_path)
    if campaign.interrupted:
        raise typer.Exit(130)
    raise typer.Exit(1 if campaign.failed else 0)


@contextmanager
def _mistakes() -> Iterator[None]:
    """Turn a user's mistake into one sentence and exit status 2."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def _console(json_path: Path | None) -> Console:
    """The console for text: standard error where JSON goes to standard output."""
    return Console(stderr=json_path == STANDARD_OUTPUT, highlight=False)


def _say(json_path: Path | None, line: str) -> None:
    print(line, file=sys.stderr if json_path == STANDARD_OUTPUT else sys.stdout)
