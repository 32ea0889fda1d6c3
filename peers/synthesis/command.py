"""`swarm synthesize`: a data set of a teacher's solutions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import to_builtins

from peers.evaluation.command import progress_shown
from peers.models.find import FORMS, find_model
from swarm.commands.rollouts import chosen
from swarm.errors import UserError
from swarm.sentences import numbered
from swarm.terminal import options
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.output import print_json

if TYPE_CHECKING:
    from peers.synthesis.write import Selection, Solution


@exits
def synthesize(
    out: Annotated[Path, typer.Option(help="New folder for the data set (Parquet).")],
    rollouts: Annotated[
        Path | None, typer.Option(help="A run's solutions: the home of its trainer or a validator.")
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(help=f"Generate the solutions on this machine with this policy: {FORMS}."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="With --teacher: environments, as in `swarm eval`.")
    ] = None,
    option: options.EnvironmentOptions = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="With --teacher: tasks of each environment.")
    ] = 256,
    samples: Annotated[
        int, typer.Option(min=1, max=4096, help="With --teacher: solutions of each task.")
    ] = 2,
    temperature: Annotated[
        float | None, typer.Option(help="With --teacher: sampling temperature; default: 1.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="With --teacher: length limit of a solution.")
    ] = None,
    seed: options.TaskSeed = 0,
    ungradable_max: options.UngradableMax = options.UNGRADABLE_MAX,
    engine: Annotated[str, typer.Option(help="With --teacher: engine.")] = "native",
    device: Annotated[str, typer.Option(help="With --teacher: device.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="With --teacher: CPU threads.")] = 1,
    home: options.EnginesHome = Path("~/.swarm"),
    solutions: Annotated[
        Path | None,
        typer.Option(
            help="With --teacher: file of all solutions, resumed if it exists. Default: "
            "OUT.solutions.jsonl."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --rollouts: folder with the run's tokenizer.json.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="With --rollouts: home or exported ledger with verdicts.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="With --rollouts: id or name of the run. With --teacher: a run's TOML file, whose "
            "environments, options and sampling are taken."
        ),
    ] = None,
    reward: Annotated[str, typer.Option(help="Keep rewards in LOW:HIGH.")] = "1:",
    tokens: Annotated[str, typer.Option(help="Keep lengths in LOW:HIGH tokens.")] = "1:",
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Keep solutions cut off at the length limit, too.")
    ] = False,
    per_task: Annotated[int, typer.Option(min=1, help="Most solutions kept of one task.")] = 4,
    similarity: Annotated[
        float, typer.Option(min=0, max=1, help="Largest likeness of two kept solutions of a task.")
    ] = 0.8,
    question_similarity: Annotated[
        float, typer.Option(min=0, max=1, help="Largest likeness of the prompts of two kept tasks.")
    ] = 1.0,
    as_json: options.AsJson = False,
) -> None:
    """Make a data set of a teacher's solutions, for `swarm sft`.

    The solutions are a run's accepted rollouts (--rollouts), or generated here (--teacher), where
    the same command resumes an interrupted generation."""
    require_extra("infer", "swarm synthesize")
    from peers.engines.installed import interpreter_for
    from peers.evaluation.run import Machine, measure, wanted_of
    from peers.synthesis.sources import RunTasks, of_rollouts, of_samples
    from peers.synthesis.write import Rules, Selection, write
    from swarm.jobs import Hardware
    from swarm.look.rollouts.export import check_target
    from swarm.look.rollouts.filters import parse_range

    if (rollouts is None) == (teacher is None):
        raise UserError("give either --rollouts SOURCE or --teacher FOLDER with --tasks")
    check_target(out, "--out", ())
    everything = (-math.inf, math.inf)
    rules = Rules(
        reward=parse_range("--reward", reward, "1:") or everything,
        tokens=parse_range("--tokens", tokens, "100:4000") or everything,
        unfinished=unfinished,
        per_task=per_task,
        similarity=similarity,
        question_similarity=question_similarity,
    )
    found: Iterator[Solution]
    if rollouts is not None:
        from peers.environments import Renderer

        if tasks is not None:
            raise UserError("--tasks goes with --teacher; a run's tasks are those of its manifest")
        source, seen = chosen(rollouts, tokenizer=tokenizer, ledger=ledger, run=run)
        of_run = None
        if source.tokenizer is not None:
            manifests = (log.manifest for log in source.verdicts())
            renderer = Renderer(source.tokenizer.folder)
            of_run = RunTasks(next(filter(None, manifests), None), renderer)
            for problem in of_run.problems:
                print(f"warning: {problem}", file=sys.stderr)
        found = of_rollouts(seen, of_run)
    else:
        assert teacher is not None
        model = find_model(teacher, "--teacher")
        folder = model.folder.resolve()
        wanted = wanted_of(
            tasks=tasks,
            run=Path(run) if run is not None else None,
            options=options.environment_options(option),
            limit=limit,
            samples=samples,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            split="train",
            seed=seed,
            ungradable_max=ungradable_max,
        )
        machine = Machine(
            engine,
            Hardware(device=device, dtype="auto", threads=threads),
            interpreter_for(engine, home.expanduser(), "", device),
        )
        beside = solutions or out.with_name(f"{out.name}.solutions.jsonl")
        measured = run_until_interrupted(measure, wanted, folder, beside, machine, progress_shown())
        found = of_samples(measured, wanted, model)
    selection = Selection(rules)
    write(found, selection, out, "run" if rollouts is not None else "local")
    _say(selection, out, as_json)


def _say(selection: Selection, out: Path, as_json: bool) -> None:
    from peers.synthesis.write import credit_lines, summary

    if as_json:
        print_json(
            {
                "folder": str(out),
                "solutions": selection.solutions,
                "kept": selection.kept,
                "tasks": selection.tasks,
                "left_out": dict(selection.left_out),
                "credits": to_builtins(selection.credits),
                "kinds": to_builtins(selection.kinds),
            }
        )
        return
    kinds = selection.kinds if len(selection.kinds) > 1 else {}
    lines = [summary(selection), *credit_lines(kinds), *credit_lines(selection.credits)]
    print(numbered("\n  ".join(lines)))
    print(f"the data set is in {out}: swarm sft --data {out}")
