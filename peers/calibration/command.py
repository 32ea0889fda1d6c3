"""`swarm proofs`: how much honest engines differ, and what a cheat looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.options import AsJson, EnvironmentOptions, environment_options
from swarm.terminal.output import check_writable, print_json
from swarm.terminal.progress import counting_bar

app = typer.Typer(help="Proofs that a rollout is the policy's.", no_args_is_help=True)


@app.command("calibrate")
@exits
def calibrate_command(
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the policy.")],
    environment: Annotated[
        str | None,
        typer.Option(help="Environment that gives prompts and rewards, as NAME@VERSION."),
    ] = None,
    option: EnvironmentOptions = None,
    engines: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated engine classes, each DTYPE or DTYPE:DEVICE; default: float32 and "
            "bfloat16 on every device of this machine. The first one validates the attacks."
        ),
    ] = None,
    previous: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of an older policy to detect; repeatable, newest first."),
    ] = None,
    submissions: Annotated[
        int, typer.Option(min=1, help="Submissions per pair of engines and per cheat.")
    ] = 1,
    groups: Annotated[int, typer.Option(min=1, help="Groups per submission.")] = 16,
    group_size: Annotated[int, typer.Option(min=2, help="Rollouts per group.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens per rollout.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.01, help="The run's temperature.")] = 1.0,
    threads: Annotated[
        int,
        typer.Option(min=0, help="Threads of the engines; 0: one per core, or OMP_NUM_THREADS."),
    ] = 0,
    cheats: Annotated[
        bool, typer.Option("--cheats", help="Measure cheats, too; takes several times as long.")
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which submissions are kept, so that a stopped measurement goes on. "
            "[default: ~/.swarm/measured]"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="TOML file for the proposed thresholds.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG file for the cheats' ROC curves; implies --cheats.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure honest engines (and cheats) on a model, and propose thresholds for its run.

    Rows appear as they are measured. A stopped measurement goes on where it stopped.
    """
    require_extra("infer", "swarm proofs calibrate")
    from peers.calibration.of_run import kept_folder

    check_writable("--out", out)
    check_writable("--plot", plot, (".png",))
    if plot is not None:
        require_extra("plots", "--plot")
    from peers.calibration.report import CalibrationOptions, run_calibration

    options = CalibrationOptions(
        model=model,
        environment=environment,
        environment_options=environment_options(option),
        engines=[name.strip() for name in engines.split(",")] if engines else [],
        previous=previous or [],
        submissions=submissions,
        groups=groups,
        group_size=group_size,
        tokens=tokens,
        temperature=temperature,
        threads=threads,
        cheats=cheats,
        keep=keep or kept_folder(),
        plot=plot,
    )
    show = (lambda _line: None) if as_json else (lambda line: print(line, flush=True))
    with counting_bar("measuring") as advance:
        report = run_calibration(options, show, advance)
    if out is not None:
        out.write_text(report.toml, encoding="utf-8")
    if as_json:
        print_json(report.summary())
    else:
        print("\n" + report.toml.rstrip())
