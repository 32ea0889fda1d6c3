"""`swarm eval`: measure a checkpoint on held-out tasks."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from peers.models.find import FORMS, find_model
from swarm.errors import UserError
from swarm.terminal import options
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.output import check_writable, print_json

if TYPE_CHECKING:
    from peers.evaluation.run import Show

REPORT_SECONDS = 2.0
"""Seconds between two reports of progress where the output is no terminal."""


@exits
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help=f"The checkpoint: {FORMS}.")],
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Environments, as NAME or NAME@VERSION, separated by commas; with --run a choice "
            "of the run's."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="A run's TOML file: take its environments, options and sampling."),
    ] = None,
    option: options.EnvironmentOptions = None,
    base: Annotated[
        str | None, typer.Option(help="Folder of a checkpoint to compare with.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Most tasks of each environment.")
    ] = 256,
    samples: Annotated[int, typer.Option(min=1, max=4096, help="Samples of each task.")] = 1,
    pass_at: Annotated[
        str, typer.Option(help="Values of k for pass@k, at most --samples, separated by commas.")
    ] = "1",
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; default: the run's, or 1.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token.")] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Length limit of a sample; default: the run's, or 512 where they fit."),
    ] = None,
    split: Annotated[
        str, typer.Option(help="held_out, which no training draws, or train.")
    ] = "held_out",
    seed: options.TaskSeed = 0,
    ungradable_max: options.UngradableMax = options.UNGRADABLE_MAX,
    engine: Annotated[str, typer.Option(help="Engine: native, vllm, or one of a package.")] = (
        "native"
    ),
    device: Annotated[str, typer.Option(help="Device, as in a peer's settings.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    interpreter: Annotated[str, typer.Option(help="Python for the child that computes.")] = "",
    home: options.EnginesHome = Path("~/.swarm"),
    out: Annotated[
        Path, typer.Option(help="File of finished samples; an existing one is resumed.")
    ] = Path("evaluation.jsonl"),
    as_json: options.AsJson = False,
) -> None:
    """Measure a checkpoint on tasks of environments, by default held-out ones. Needs no network.

    Prints pass@k and the mean reward with 95 % confidence intervals. Interrupt it at will: the same
    command resumes it. With --base the base's samples are in FILE.base.jsonl beside --out."""
    require_extra("infer", "swarm eval")
    from peers.engines.installed import interpreter_for
    from peers.evaluation import report
    from peers.evaluation.run import Machine, measure, wanted_of
    from swarm.jobs import Hardware

    if split not in ("held_out", "train"):
        raise UserError(f"--split is {split!r}; it must be held_out or train")
    options.check_dtype(dtype)
    if temperature is not None:
        options.check_temperature(temperature)
    folder = find_model(checkpoint, "CHECKPOINT").folder.resolve()
    base_folder = None if base is None else find_model(base, "--base").folder.resolve()
    check_writable("--out", out)
    machine = Machine(
        engine,
        Hardware(device=device, dtype=dtype, threads=threads),
        interpreter_for(engine, home.expanduser(), interpreter, device),
    )
    folders = [("", folder, out)]
    if base_folder is not None:
        folders.append(("base: ", base_folder, out.with_suffix(f".base{out.suffix}")))
    wanted = wanted_of(
        tasks=tasks,
        run=run,
        options=options.environment_options(option),
        limit=limit,
        pass_at=pass_at,
        samples=samples,
        temperature=temperature,
        greedy=greedy,
        max_new_tokens=max_new_tokens,
        split=cast(Literal["train", "held_out"], split),
        seed=seed,
        ungradable_max=ungradable_max,
    )
    measured = []
    for prefix, folder, file in folders:
        show = progress_shown(prefix)
        measured.append(run_until_interrupted(measure, wanted, folder, file, machine, show))
        # Of a base the same is asked as of its checkpoint.
        wanted = replace(wanted, max_new_tokens=measured[0].drawn.max_new_tokens)
    if as_json:
        print_json(report.report(wanted, *measured))
    else:
        print("\n\n".join(report.tables(wanted, *measured)))


def progress_shown(prefix: str = "") -> Show:
    """What shows progress on standard error."""
    shown = -math.inf

    def show(environment: str, finished: int, total: int, reward: float | None) -> None:
        nonlocal shown
        over, terminal, now = finished == total, sys.stderr.isatty(), time.monotonic()
        if not over and now - shown < (0.1 if terminal else REPORT_SECONDS):
            return
        shown = now
        text = f"{prefix}{environment}: {finished} of {total} samples"
        if reward is not None:
            text += f", mean reward {reward:.3f}"
        print(
            f"\r{text}" if terminal else text,
            end="\n" if over or not terminal else "",
            file=sys.stderr,
            flush=True,
        )

    return show
