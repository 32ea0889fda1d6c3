"""`python -m simnet`: run a scenario, list those there are.

python -m simnet run join --peers 50 --seed 1 --json join.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from simnet import plan as planning
from simnet import scenarios
from simnet.clock import Deadlock, run_virtual
from simnet.observations import Observations
from simnet.plot import SUFFIXES as PLOT_SUFFIXES
from simnet.plot import draw
from simnet.report import print_report
from simnet.simulation import Simulation
from simnet.watch import Watch
from swarm.errors import SwarmError, UserError

command = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

VIRTUAL_SECONDS_MAX = 7 * 24 * 3600.0


def simulate(
    name: str,
    *,
    peers: int | None = None,
    seed: int = 1,
    model_bytes: int | None = None,
    watch: Watch | None = None,
    plot_path: Path | None = None,
) -> dict[str, Any]:
    """Run a scenario to its end, or until `watch` was interrupted; the report that `--json`
    writes. Raises `UserError`; `Deadlock` names seed and replay."""
    scenario = scenarios.load(name)
    peers = scenario.peers if peers is None else peers
    if peers < scenario.peers_min:
        raise UserError(f"{name} needs at least {scenario.peers_min} peers, not {peers}")
    workload = scenario.workload
    if model_bytes is not None:
        workload = dataclasses.replace(workload, model_bytes=model_bytes)
    watch = watch or Watch()
    simulation = Simulation(seed, weather=scenario.weather, workload=workload)
    observations = Observations(simulation)
    figures: dict[str, Any] = {}
    virtual_seconds = 0.0

    async def main() -> None:
        nonlocal virtual_seconds
        with watch.watching(simulation):
            async with simulation.running():
                figures.update(await scenario.run(simulation, peers))
                virtual_seconds = simulation.now()
        if watch.interrupted:
            virtual_seconds = simulation.now()

    started = time.perf_counter()
    run_virtual(main, seed=seed, limit_seconds=VIRTUAL_SECONDS_MAX)
    report = {
        "scenario": name,
        "peers": peers,
        "seed": seed,
        "virtual_seconds": round(virtual_seconds, 6),
        "wall_seconds": round(time.perf_counter() - started, 3),
        "events": simulation.trace.events,
        "trace_hash": simulation.trace.digest(),
        "violations": simulation.violations,
        "figures": figures,
        "network": observations.summary(),
        **({"interrupted": True} if watch.interrupted else {}),
    }
    if plot_path is not None:
        draw(observations, report, plot_path)
    return report


@command.command("list")
def list_scenarios() -> None:
    """Show the scenarios there are."""
    for name in scenarios.names():
        scenario = scenarios.load(name)
        print(f"{name:12}{scenario.about} ({scenario.peers} peers)")


@command.command()
def run(
    scenario: Annotated[str, typer.Argument(help="Its name (python -m simnet list).")],
    peers: Annotated[int | None, typer.Option(help="How many peers.")] = None,
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 1,
    model_gb: Annotated[float | None, typer.Option(help="Size of a checkpoint.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw it here (.png, .svg or .pdf).")
    ] = None,
) -> None:
    """Run a scenario; the exit status is 1 if an invariant was violated, 130 after Ctrl-C."""
    replay = f"python -m simnet run {scenario} --seed {seed}"
    replay += "" if peers is None else f" --peers {peers}"
    replay += "" if model_gb is None else f" --model-gb {model_gb:g}"
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
            watch=Watch(show=True),
            plot_path=plot_path,
        )
        if json_path is not None:
            write_json(report, json_path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except Deadlock as error:
        print(f"error: {error}\nseed {seed}; replay: {replay}", file=sys.stderr)
        raise typer.Exit(1) from error
    except SwarmError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print_report(report, replay)
    for what, path in (("plot", plot_path), ("report", json_path)):
        if path is not None:
            print(f"{what} written to {path}")
    if report.get("interrupted"):
        raise typer.Exit(130)
    raise typer.Exit(1 if report["violations"] else 0)


@command.command()
def plan(
    model_gb: Annotated[float, typer.Option(help="Size of a checkpoint.")] = 62.0,
    inference: Annotated[int, typer.Option(help="How many inference peers.")] = 200,
    relays: Annotated[int, typer.Option(help="How many relays.")] = 4,
    uplink_mbps: Annotated[float, typer.Option(help="Of an inference peer.")] = 200.0,
    downlink_mbps: Annotated[float, typer.Option(help="Of the slowest inference peer.")] = 500.0,
    relay_uplink_mbps: Annotated[float, typer.Option(help="Of a relay.")] = 10_000.0,
    trainer_uplink_mbps: Annotated[float, typer.Option(help="Of the trainer.")] = 1000.0,
    step_minutes: Annotated[
        float | None, typer.Option(help="What the trainer needs for a step.")
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
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the plan here.")] = None,
) -> None:
    """How long does a broadcast take, how many relays do I need, what will my trainer idle?"""
    network = planning.Network(
        model_gb, inference, relays, uplink_mbps, downlink_mbps, relay_uplink_mbps,
        trainer_uplink_mbps,
    )  # fmt: skip
    try:
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
        found = planning.make_plan(
            network, step_minutes=step_minutes, batch_minutes=batch_minutes,
            asynchrony=asynchrony, simulated=simulated,
        )  # fmt: skip
        if json_path is not None:
            write_json(found, json_path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    planning.print_plan(network, found)


def check_writable(option: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    """Raise `UserError` if a file could not be written at the end: before anything is run."""
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise UserError(f"{option} {path} must end with {' or '.join(suffixes)}")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path} cannot be written: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option} {path} cannot be written: no permission")


def write_json(report: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written ({error.strerror})") from error


if __name__ == "__main__":
    command()
