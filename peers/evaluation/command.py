"""`swarm eval`: measure a checkpoint on held-out tasks."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from peers.models.find import FORMS, find_model
from swarm.errors import UserError
from swarm.terminal import options
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import explained
from swarm.terminal.output import check_writable, print_json

if TYPE_CHECKING:
    from peers.evaluation.run import Show

REPORT_SECONDS = 2.0
"""Seconds between two reports of progress where the output is no terminal."""


@exits
@explained(__file__, FORMS=FORMS)
def evaluate(
    model: str,
    environment: options.Environments = None,
    run_file: options.RunFile = None,
    option: options.EnvironmentOptions = None,
    base: str | None = None,
    limit: int = 256,
    samples: int = 1,
    pass_at: str = "1",
    temperature: float | None = None,
    greedy: bool = False,
    max_new_tokens: int | None = None,
    split: str = "held_out",
    seed: options.TaskSeed = 0,
    ungradable_max: options.UngradableMax = options.UNGRADABLE_MAX,
    engine: str = "native",
    given: options.ComputeSettings = None,
    home: options.Home = Path("~/.swarm"),
    out: Path = Path("evaluation.jsonl"),
    as_json: options.AsJson = False,
) -> None:
    """Measure a checkpoint on tasks of environments, by default held-out ones. Needs no network.

    Prints pass@k and the mean reward with 95 % confidence intervals. Interrupt it at will: the same
    command resumes it. With --base the base's samples are in FILE.base.jsonl beside --out."""
    require_extra("infer", "swarm eval")
    from peers.engines.installed import interpreter_for
    from peers.evaluation import report
    from peers.evaluation.run import Machine, measure, wanted_of
    from swarm.settings import ComputeSettings, from_line

    if split not in ("held_out", "train"):
        raise UserError(f"--split is {split!r}; it must be held_out or train")
    if temperature is not None:
        options.check_temperature(temperature)
    folder = find_model(model, "--model").folder.resolve()
    base_folder = None if base is None else find_model(base, "--base").folder.resolve()
    check_writable("--out", out)
    own = from_line("inference", ComputeSettings, given or (), {})
    python = interpreter_for(engine, home.expanduser(), own.interpreter, own.device)
    machine = Machine(engine, own.hardware, python)
    folders = [("", folder, out)]
    if base_folder is not None:
        folders.append(("base: ", base_folder, out.with_suffix(f".base{out.suffix}")))
    wanted = wanted_of(
        names=environment,
        run_file=run_file,
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
