"""`swarm dataset`: choose the tasks of a run.

INTELLECT-2 kept problems that its base model solved in 12.5 % to 50 % of 8 attempts (arXiv
2505.07291, §3.3): other problems teach little at first."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peers.dataset.similar import Novelty
from peers.evaluation.command import progress_shown
from peers.models.find import FORMS, find_model
from swarm.errors import UserError
from swarm.look.rollouts.filters import parse_range
from swarm.sentences import numbered
from swarm.terminal import options as common
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import explained
from swarm.terminal.output import check_writable, to_json, write_text
from swarm.terminal.progress import progress_bar

if TYPE_CHECKING:
    from peers.environments import Environment, Task

SHARE = "solve_rate"
"""Column with the share of right attempts."""

NAMED_MAX = 20
"""Rows too much like an evaluation that are named one by one."""

app = typer.Typer(help="Choose the tasks of a run.", no_args_is_help=True)


@app.command("filter")
@exits
@explained(__file__, FORMS=FORMS)
def filter_command(
    model: str,
    environment: str,
    option: common.EnvironmentOptions = None,
    samples: int = 8,
    solve_rate: str = "0.125:0.5",
    limit: int = 1024,
    seed: common.TaskSeed = 0,
    temperature: common.Temperature = 1.0,
    ungradable_max: common.UngradableMax = common.UNGRADABLE_MAX,
    max_new_tokens: int = 512,
    out: Path = Path("filtered.jsonl"),
) -> None:
    """Try tasks with a policy and keep those that it solves sometimes.

    Interrupt it at will: the same command resumes it. The attempts are in OUT.samples.jsonl."""
    require_extra("infer", "swarm dataset filter")
    from peers.environments import load
    from peers.evaluation.run import Machine, measure, wanted_of
    from peers.evaluation.tasks import tasks_of
    from swarm.jobs import Hardware

    low, high = parse_range("--solve-rate", solve_rate, "0.125:0.5") or (0.0, 1.0)
    common.check_temperature(temperature)
    check_writable("--out", out, (".jsonl",))
    folder = find_model(model, "--model").folder.resolve()
    wanted = wanted_of(
        names=[environment],
        options=common.environment_options(option),
        limit=limit,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        split="train",
        seed=seed,
        ungradable_max=ungradable_max,
    )
    measured = run_until_interrupted(
        measure,
        wanted,
        folder,
        out.with_name(f"{out.name}.samples.jsonl"),
        Machine("native", Hardware(), None),
        progress_shown(),
    )
    (named,) = wanted.environments
    kept: list[tuple[Task, float]] = []
    (drawn,) = tasks_of(wanted, folder)
    for (_, task), tried in zip(drawn, measured.samples[0], strict=True):
        share = sum(sample.reward >= 1.0 for sample in tried) / samples
        if low <= share <= high and not any(sample.problem for sample in tried):
            kept.append((task, share))
    rows = _rows(load(named.name, named.version, named.options), kept)
    write_text("--out", "\n".join(map(to_json, rows)), out)
    total = measured.drawn.tasks[0]
    if total < limit:
        print(f"{environment} has no other prompts than these {total}", file=sys.stderr)
    print(numbered(f"{len(kept)} of {total} tasks are kept; they are in {out}"))


def _rows(environment: Environment, kept: Sequence[tuple[Task, float]]) -> Iterator[dict[str, Any]]:
    """The kept tasks with the share of right attempts: of a data set its own rows, of any other
    environment what its option `kept` reads."""
    from peers.environments.dataset import OfRows
    from peers.environments.interface import Wrapper
    from peers.environments.kept import Kept, kept_row

    while isinstance(environment, Wrapper) and not isinstance(environment, Kept):
        environment = environment.inner
    shares = {task.own.prompt: share for task, share in kept}
    if isinstance(environment, OfRows):
        for index in environment.indices:
            with suppress(UserError):
                share = shares.pop(environment.task_of_row(index).prompt, None)
                if share is not None:
                    yield {**environment.rows[index], SHARE: share}
        return
    for task, share in kept:
        yield {**kept_row(task.own), SHARE: share}


@app.command("select")
@exits
@explained(__file__)
def select_command(
    option: common.EnvironmentOptions = None,
    similarity: float = 0.8,
    apart_from: list[str] | None = None,
    out: Path = Path("selected.jsonl"),
) -> None:
    """Keep each prompt of the environment dataset once, apart from evaluations; needs no policy.

    Conditions on columns, lengths and writing systems are its option `where`."""
    require_extra("infer", "swarm dataset select")
    check_writable("--out", out, (".jsonl",))
    options = common.environment_options(option)
    evaluations = (
        (prompt, place)
        for each in apart_from or ()
        for _, prompt, place in _prompts(_evaluation(each, options))
    )
    novelty, counts = Novelty(similarity, evaluations), Counter[str]()
    part = out.with_suffix(".part")
    try:
        with part.open("w", encoding="utf-8") as file, progress_bar("rows", counted=True) as show:
            for row, prompt, place in _prompts(options):
                show(counts.total(), None)
                reason = novelty.why_not(prompt, place) if prompt else "unusable"
                counts[reason] += 1
                if not reason:
                    print(to_json(row), file=file)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)  # of a selection that failed
    for sentence in novelty.contaminated[:NAMED_MAX]:
        print(numbered(f"warning: {sentence}"), file=sys.stderr)
    total, kept = counts.total(), counts.pop("", 0)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "none"
    print(numbered(f"{kept:,} of {total:,} rows are kept; they are in {out}; left out: {reasons}"))


def _evaluation(given: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of the environment dataset for an evaluation, by default with the same prompt."""
    from peers.environments.pairs import json_pairs

    table: Any = {"path": given}
    if given.startswith("{"):
        (line,) = common.environment_options([f"x = {given}"]).values()
        table = json_pairs(line, "--apart-from")
    columns = json_pairs(options.get("columns", []), "columns") | table.get("columns", {})
    return {**table, "columns": {"prompt": columns.get("prompt", "prompt"), "answer": ""}}


def _prompts(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Row, prompt and place of the rows of the environment dataset; no prompt if it is unusable."""
    from peers.environments import load
    from peers.environments.dataset import OfRows
    from peers.environments.interface import UnusableTask, Wrapper, messages_of

    environment = load("dataset", "1", options)
    while isinstance(environment, Wrapper):
        environment = environment.inner
    assert isinstance(environment, OfRows)
    for index in environment.indices:
        place = environment.rows.place(index)
        try:
            contents = [each.content for each in messages_of(environment.usable(index).prompt)]
            yield environment.rows[index], "\n".join(contents), place
        except UnusableTask:
            yield {}, "", place
