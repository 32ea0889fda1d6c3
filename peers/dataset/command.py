"""`swarm dataset`: choose the tasks of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import (
    SEED_MAX,
    EnvironmentOptions,
    Temperature,
    check_temperature,
    environment_options,
)

app = typer.Typer(help="Choose the tasks of a run.", no_args_is_help=True)


@app.command("filter")
@exits
def filter_command(
    policy: Annotated[Path, typer.Option(help="Hugging Face folder of the base policy.")],
    environment: Annotated[
        str, typer.Option(help="Environment of the tasks, as in a run manifest.")
    ],
    environment_version: Annotated[str, typer.Option(help="Version of the environment.")] = "1",
    option: EnvironmentOptions = None,
    pass_at: Annotated[int, typer.Option(min=1, help="Attempts per task.")] = 8,
    keep: Annotated[
        str, typer.Option(help="Lowest and highest share of right attempts to keep.")
    ] = "0.125:0.5",
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to try.")] = 1024,
    seed: Annotated[
        int,
        typer.Option(min=0, max=SEED_MAX, help="Seed of the choice of tasks and of the sampling."),
    ] = 0,
    temperature: Temperature = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of an attempt.")] = 512,
    out: Annotated[
        Path, typer.Option(help="File of JSON lines; an existing one is resumed.")
    ] = Path("filtered.jsonl"),
    responses: Annotated[
        Path | None,
        typer.Option(
            help="File for the texts and scores of all attempts: JSON lines in the form of genesys."
        ),
    ] = None,
) -> None:
    """Try tasks with a policy and keep those that it solves sometimes.

    Interrupt it at will: the same command resumes it.
    """
    require_extra("infer", "swarm dataset filter")
    from peers.dataset.filtering import Filtering, Progress, filter_tasks, parse_bounds

    low, high = parse_bounds(keep)
    check_temperature(temperature)
    wanted = Filtering(
        policy=policy,
        environment=environment,
        version=environment_version,
        options=environment_options(option),
        attempts=pass_at,
        low=low,
        high=high,
        tasks=tasks,
        seed=seed,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
    )

    def show(progress: Progress) -> None:
        text = f"{progress.tried} of {progress.total} tasks tried, {progress.kept} kept"
        end = "\n" if progress.tried == progress.total or not sys.stderr.isatty() else ""
        print(f"\r{text}" if sys.stderr.isatty() else text, end=end, file=sys.stderr)

    done = run_until_interrupted(filter_tasks, wanted, out, show, responses)
    if done.tried < tasks:
        print(f"{environment} has no other prompts than these {done.tried}", file=sys.stderr)
    print(numbered(f"{done.kept} of {done.tried} tasks are kept; the results are in {out}"))
