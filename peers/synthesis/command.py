"""`swarm synthesize`: a data set of a teacher's solutions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
from swarm.terminal.options import explained
from swarm.terminal.output import print_json

if TYPE_CHECKING:
    from peers.synthesis.write import Selection, Solution


@exits
@explained(__file__, FORMS=FORMS)
def synthesize(
    out: Path,
    rollouts: Path | None = None,
    model: str | None = None,
    environment: options.Environments = None,
    run_file: options.RunFile = None,
    option: options.EnvironmentOptions = None,
    limit: int = 256,
    samples: int = 2,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    seed: options.TaskSeed = 0,
    ungradable_max: options.UngradableMax = options.UNGRADABLE_MAX,
    engine: str = "native",
    given: options.ComputeSettings = None,
    home: options.Home = Path("~/.swarm"),
    solutions: Path | None = None,
    tokenizer: Path | None = None,
    ledger: options.VerdictSource = None,
    run: options.WhichRun = None,
    reward: str = "1:",
    tokens: str = "1:",
    unfinished: bool = False,
    per_task: int = 4,
    similarity: float = 0.8,
    question_similarity: float = 1.0,
    as_json: options.AsJson = False,
) -> None:
    """Make a data set of a teacher's solutions, for `swarm sft`.

    The solutions are a run's accepted rollouts (--rollouts), or generated here (--model), where
    the same command resumes an interrupted generation."""
    require_extra("infer", "swarm synthesize")
    from peers.engines.installed import interpreter_for
    from peers.evaluation.run import Machine, measure, wanted_of
    from peers.synthesis.sources import RunTasks, of_rollouts, of_samples
    from peers.synthesis.write import Rules, Selection, write
    from swarm.look.rollouts.export import check_target
    from swarm.look.rollouts.filters import parse_range
    from swarm.settings import ComputeSettings, from_line

    if (rollouts is None) == (model is None):
        raise UserError("give either --rollouts SOURCE or --model MODEL with --environment NAME")
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

        if environment or run_file:
            raise UserError(
                "--environment and --run-file go with --model; a run's tasks are its manifest's"
            )
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
        assert model is not None
        teacher = find_model(model, "--model")
        folder = teacher.folder.resolve()
        wanted = wanted_of(
            names=environment,
            run_file=run_file,
            options=options.environment_options(option),
            limit=limit,
            samples=samples,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            split="train",
            seed=seed,
            ungradable_max=ungradable_max,
        )
        own = from_line("inference", ComputeSettings, given or (), {})
        python = interpreter_for(engine, home.expanduser(), own.interpreter, own.device)
        machine = Machine(engine, own.hardware, python)
        beside = solutions or out.with_name(f"{out.name}.solutions.jsonl")
        measured = run_until_interrupted(measure, wanted, folder, beside, machine, progress_shown())
        found = of_samples(measured, wanted, teacher)
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
