"""`python -m simnet`: run a scenario, list those there are.

python -m simnet run join --peers 50 --seed 1 --json join.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from simnet import scenarios
from simnet.clock import run_virtual
from simnet.simulation import Simulation
from swarm.errors import SwarmError, UserError

command = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

VIRTUAL_SECONDS_MAX = 7 * 24 * 3600.0


def simulate(
    name: str, *, peers: int | None = None, seed: int = 1, model_bytes: int | None = None
) -> dict[str, Any]:
    """Run a scenario to its end; the report that `--json` writes. Raises `UserError`."""
    scenario = scenarios.load(name)
    peers = scenario.peers if peers is None else peers
    workload = scenario.workload
    if model_bytes is not None:
        workload = dataclasses.replace(workload, model_bytes=model_bytes)
    simulation = Simulation(seed, weather=scenario.weather, workload=workload)
    figures: dict[str, Any] = {}
    virtual_seconds = 0.0

    async def main() -> None:
        nonlocal virtual_seconds
        async with simulation.running():
            figures.update(await scenario.run(simulation, peers))
            virtual_seconds = simulation.now()

    started = time.perf_counter()
    run_virtual(main, seed=seed, limit_seconds=VIRTUAL_SECONDS_MAX)
    return {
        "scenario": name,
        "peers": peers,
        "seed": seed,
        "virtual_seconds": round(virtual_seconds, 6),
        "wall_seconds": round(time.perf_counter() - started, 3),
        "events": simulation.trace.events,
        "trace_hash": simulation.trace.digest(),
        "violations": simulation.violations,
        "figures": figures,
    }


def print_report(report: dict[str, Any]) -> None:
    """The report for a person."""
    virtual, wall = report["virtual_seconds"], report["wall_seconds"]
    print(
        f"{report['scenario']}: {report['peers']} peers, seed {report['seed']}: "
        f"{virtual:.1f} s of virtual time in {wall:.1f} s, {report['events']} events"
    )
    for name, value in report["figures"].items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {part:,}" for key, part in value.items())
        print(f"  {name.replace('_', ' ')}: {value:,}" if not isinstance(value, str) else
              f"  {name.replace('_', ' ')}: {value}")  # fmt: skip
    print(f"  trace hash: {report['trace_hash']}")
    for violation in report["violations"]:
        print(f"VIOLATION {violation}")
    if report["violations"]:
        print(
            "replay: python -m simnet run "
            f"{report['scenario']} --peers {report['peers']} --seed {report['seed']}"
        )


@command.command("list")
def list_scenarios() -> None:
    """Show the scenarios there are."""
    for name in scenarios.names():
        scenario = scenarios.load(name)
        print(f"{name:12}{scenario.about} ({scenario.peers} peers)")


@command.command()
def run(
    scenario: Annotated[str, typer.Argument(help="Its name (python -m simnet list).")],
    peers: Annotated[int | None, typer.Option(min=10, help="How many peers.")] = None,
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 1,
    model_gb: Annotated[float | None, typer.Option(min=1e-3, help="Size of a checkpoint.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """Run a scenario; the exit status is 1 if an invariant was violated."""
    try:
        model_bytes = None if model_gb is None else int(model_gb * 1e9)
        report = simulate(scenario, peers=peers, seed=seed, model_bytes=model_bytes)
        if json_path is not None:
            try:
                json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                raise UserError(
                    f"--json {json_path} cannot be written ({error.strerror})"
                ) from error
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except SwarmError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print_report(report)
    raise typer.Exit(1 if report["violations"] else 0)


if __name__ == "__main__":
    command()
