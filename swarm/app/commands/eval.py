"""`swarm eval`: measure a checkpoint on held-out tasks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from swarm.app.exit import exits
from swarm.app.extras import require_extra
from swarm.app.interrupt import run_until_interrupted
from swarm.app.options import AsJson, EnvironmentOptions, environment_options
from swarm.app.output import check_writable, print_json
from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.app.evaluation.run import Progress

REPORT_SECONDS = 2.0
"""Seconds between two reports of progress where the output is no terminal."""


@exits
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder of the checkpoint.")],
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
    option: EnvironmentOptions = None,
    base: Annotated[
        Path | None, typer.Option(help="Folder of a checkpoint to compare with.")
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
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks and of the sampling.")] = 0,
    step: Annotated[
        int, typer.Option(min=0, help="Step of the run for which curricula draw their tasks.")
    ] = 0,
    engine: Annotated[str, typer.Option(help="Engine: native, vllm, or one of a package.")] = (
        "native"
    ),
    device: Annotated[str, typer.Option(help="Device, as in a peer's settings.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    interpreter: Annotated[str, typer.Option(help="Python for the child that computes.")] = "",
    home: Annotated[
        Path, typer.Option(help="Folder where `swarm engine install` puts engines.")
    ] = Path("~/.swarm"),
    out: Annotated[
        Path, typer.Option(help="File of finished samples; an existing one is resumed.")
    ] = Path("evaluation.jsonl"),
    as_json: AsJson = False,
) -> None:
    """Measure a checkpoint on tasks of environments, by default held-out ones. Needs no network.

    Prints pass@k and the mean reward with 95 % confidence intervals. Interrupt it at will: the same
    command resumes it. With --base the base's samples are in FILE.base.jsonl beside --out.
    """
    require_extra("infer", "swarm eval")
    from peers.engines.installed import interpreter_for
    from swarm.app.evaluation import options, report
    from swarm.app.evaluation.run import Machine, measure
    from swarm.jobs import Hardware

    if split not in ("held_out", "train"):
        raise UserError(f"--split is {split!r}; it must be held_out or train")
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UserError(f"--dtype is {dtype!r}; it must be auto, float32 or bfloat16")
    for name, folder in (("CHECKPOINT", checkpoint), ("--base", base)):
        if folder is not None and not folder.is_dir():
            raise UserError(f"{name} {folder} is no folder; name a Hugging Face folder")
    check_writable("--out", out)
    wanted = options.wanted_of(
        options.Given(
            tasks=tasks,
            run=run,
            options=environment_options(option),
            limit=limit,
            pass_at=pass_at,
            samples=samples,
            temperature=temperature,
            greedy=greedy,
            max_new_tokens=max_new_tokens,
            split=cast(Literal["train", "held_out"], split),
            seed=seed,
            step=step,
        )
    )
    machine = Machine(
        engine,
        Hardware(device=device, dtype=dtype, threads=threads),
        interpreter_for(engine, home.expanduser(), interpreter, device),
    )
    found = run_until_interrupted(
        measure, wanted, checkpoint.resolve(), out, machine, _Reporter("").show
    )
    compared = None
    if base is not None:
        beside = out.with_suffix(f".base{out.suffix}")
        again = options.as_measured(wanted, found.drawn)
        show = _Reporter("base: ").show
        compared = run_until_interrupted(measure, again, base.resolve(), beside, machine, show)
    if as_json:
        print_json(report.report(wanted, found, compared))
        return
    print(report.details(wanted, found))
    if compared is not None:
        print(f"\n{report.comparison(wanted, found, compared)}")


class _Reporter:
    """Shows progress on standard error."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._shown = float("-inf")

    def show(self, progress: Progress) -> None:
        over = progress.finished == progress.total
        terminal = sys.stderr.isatty()
        now = time.monotonic()
        if not over and now - self._shown < (0.1 if terminal else REPORT_SECONDS):
            return
        self._shown = now
        text = (
            f"{self._prefix}{progress.environment}: {progress.finished} of {progress.total} samples"
            f", mean reward {progress.reward:.3f}"
        )
        print(
            f"\r{text}" if terminal else text,
            end="\n" if over or not terminal else "",
            file=sys.stderr,
            flush=True,
        )
