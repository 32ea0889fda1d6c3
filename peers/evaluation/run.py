"""What to evaluate, by options and a run's file, and its run in a child process."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from msgspec import structs

from peers.environments.registry import load_any
from peers.evaluation.samples import SampleFile, Ungradable, open_samples
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.jobs import evaluation as jobs
from swarm.run.toml import describe_run
from swarm.terminal.options import UNGRADABLE_MAX
from swarm.terminal.tables import struct_from_mapping
from swarm.wire.manifest import EnvironmentReference, Sampling, labels, one_or_each
from swarm.world import Child, Compute, client
from swarm.world.compute import LocalCompute

Split = Literal["train", "held_out"]

ANSWERS_KEPT = 4
"""Answers of `accuracies` that are kept for people to read."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is asked of a checkpoint; the same is asked of its base."""

    environments: list[EnvironmentReference]
    split: Split
    tasks: int
    samples: int
    pass_at: list[int] = field(default_factory=lambda: [1])
    temperature: float
    """Of environments without one of their own."""
    greedy: bool = False
    max_new_tokens: int
    """0: the service decides."""
    stop_ids: list[int]
    """Empty: those of the checkpoint."""
    seed: int = 0
    ungradable_max: float = UNGRADABLE_MAX
    """Largest share of faulty rows, or of samples that cannot be graded."""

    @property
    def temperatures(self) -> float | list[float]:
        """The temperature of all environments, or a list of each one's."""
        return one_or_each([each.sampled_at(self.temperature) for each in self.environments])

    @property
    def labels(self) -> list[str]:
        """Each environment's name in tables, different from all others."""
        return labels(self.environments)


def wanted_of(
    *,
    names: Sequence[str] | None,
    options: dict[str, Any],
    limit: int,
    samples: int,
    temperature: float | None,
    max_new_tokens: int | None,
    split: Split,
    seed: int,
    run_file: Path | None = None,
    pass_at: str = "1",
    greedy: bool = False,
    ungradable_max: float = UNGRADABLE_MAX,
) -> Evaluation:
    """Check options as they were typed, and complete them from a run's file; raises `UserError`."""
    environments, table = _environments(names or (), run_file, options)
    wanted = {"stop_ids": [0], **table, "group_size": samples}
    if temperature is not None:
        wanted["temperature"] = temperature
        environments = [structs.replace(each, temperature=None) for each in environments]
    if max_new_tokens is not None:
        wanted["max_new_tokens"] = max_new_tokens
    where = "options" if run_file is None else f"{run_file}: sampling"
    sampling = struct_from_mapping(Sampling, wanted, where)
    if greedy and samples > 1:
        raise UserError(
            f"--greedy gives all {samples} --samples of a task the same tokens; omit one of the two"
        )
    return Evaluation(
        environments=environments,
        split=split,
        tasks=limit,
        samples=samples,
        pass_at=_pass_at(pass_at, samples),
        temperature=sampling.temperature,
        greedy=greedy,
        max_new_tokens=sampling.max_new_tokens if "max_new_tokens" in wanted else 0,
        stop_ids=sampling.stop_ids if "stop_ids" in table else [],
        seed=seed,
        ungradable_max=ungradable_max,
    )


def _environments(
    names: Sequence[str], run_file: Path | None, options: dict[str, Any]
) -> tuple[list[EnvironmentReference], dict[str, Any]]:
    if len(set(names)) < len(names):
        raise UserError(f"--environment names one twice ({', '.join(names)}); give each once")
    if run_file is None:
        if not names:
            raise UserError("give --environment NAME, or --run-file FILE.toml to take a run's")
        if options and len(names) > 1:
            raise UserError(
                f"--option is for one environment, and --environment names {len(names)}; put "
                "several with options in a run's TOML file and give it with --run-file"
            )
        return [environment_named(name, options) for name in names], {}
    if options:
        raise UserError(
            f"--option and --run-file exclude each other: {run_file} has the options of each "
            "environment"
        )
    described = describe_run(run_file)
    table = described.table.get("sampling", {})
    if not isinstance(table, dict):
        raise UserError(f"{run_file}: sampling must be a table, not {type(table).__name__}")
    found = dict(zip(labels(described.environments), described.environments, strict=True))
    chosen = names or list(found)
    for name in chosen:
        if name not in found:
            raise UserError(
                f"--environment is {name!r}, which {run_file} lacks; there are: {', '.join(found)}"
            )
    return [found[name] for name in chosen], table


def _pass_at(text: str, samples: int) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UserError(f"--pass-at is {text!r}; it must be positive integers, like 1 or 1,8")
    if found[-1] > samples:
        raise UserError(
            f"--pass-at asks for pass@{found[-1]}, but --samples is {samples}; raise it to at "
            f"least {found[-1]}"
        )
    return found


def environment_named(text: str, options: dict[str, Any]) -> EnvironmentReference:
    """The environment that `--environment NAME[@VERSION]` names; raises `UserError`.

    Without a version the one that is installed here."""
    name, _, version = text.partition("@")
    if not version:
        version = load_any(name, options).version
    table = {"name": name, "version": version, "options": options}
    return struct_from_mapping(EnvironmentReference, table, f"--environment {name}")


SERVICE = "peers.evaluation.service:EvaluationService"


async def draw(child: Child, wanted: Evaluation) -> jobs.TasksDrawn:
    """Draw the tasks of an evaluation; raises `UserError`."""
    return await client(jobs.EvaluationService, child).draw(
        jobs.DrawTasks(
            split=wanted.split,
            seed=wanted.seed,
            tasks=wanted.tasks,
            max_new_tokens=wanted.max_new_tokens,
            stop_ids=wanted.stop_ids,
        )
    )


async def play_rows(
    child: Child, wanted: Evaluation, drawn: jobs.TasksDrawn, environment: int, rows: Iterable[int]
) -> AsyncIterator[jobs.Sample]:
    """Play rows of an environment, given by its index: row r is a sample of task r // samples."""
    job = jobs.PlayTasks(
        environment=environment,
        rows=list(rows),
        sampling=Sampling(
            temperature=wanted.environments[environment].sampled_at(wanted.temperature),
            max_new_tokens=drawn.max_new_tokens,
            stop_ids=drawn.stop_ids,
            group_size=wanted.samples,
        ),
        greedy=wanted.greedy,
    )
    service = client(jobs.EvaluationService, child)
    await service.play(job)
    while samples := await service.finished(jobs.NextSamples()):
        for sample in samples:
            yield sample


async def play_all(
    child: Child, wanted: Evaluation, drawn: jobs.TasksDrawn
) -> list[list[jobs.Sample]]:
    """All samples by environment, in order of rows."""
    found = []
    for index, tasks in enumerate(drawn.tasks):
        rows = range(tasks * wanted.samples)
        played = [sample async for sample in play_rows(child, wanted, drawn, index, rows)]
        found.append(sorted(played, key=lambda sample: sample.row))
    return found


async def accuracies(
    compute: Compute,
    folder: Path,
    environments: Sequence[EnvironmentReference],
    sampling: Sampling,
    tasks: int,
) -> jobs.Evaluated:
    """How often the policy in an absolute folder is right in held-out tasks, sampled and greedy.
    `tasks`: of each environment with a positive weight."""
    weighted = [each for each in environments if each.weight]
    wanted = Evaluation(
        environments=weighted,
        split="held_out",
        tasks=tasks,
        samples=1,
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        stop_ids=sampling.stop_ids,
    )
    allowed = tuple(each.name for each in weighted)
    setup = jobs.EvaluationSetup(folder=str(folder), environments=weighted, allowed=allowed)
    async with compute.child(
        SERVICE, setup, name="evaluation", start_deadline_seconds=jobs.EVALUATION_START_SECONDS
    ) as child:
        drawn = await draw(child, wanted)
        sampled = await play_all(child, wanted, drawn)
        greedy = await play_all(child, replace(wanted, greedy=True), drawn)
    weights = [each.weight for each in weighted]
    means = [
        fmean((fmean(sample.reward for sample in own) for own in played), weights)
        for played in (sampled, greedy)
    ]
    answers = [
        jobs.Answer(each.prompt[-1].content, " ⏎ ".join(each.turns[1::2]), each.reward)
        for own in sampled
        for each in own
    ]
    return jobs.Evaluated(sampled=means[0], greedy=means[1], answers=answers[:ANSWERS_KEPT])


@dataclass(frozen=True)
class Machine:
    """Where the child computes."""

    engine: str
    hardware: Hardware
    interpreter: str | None


Show = Callable[[str, int, int, float | None], None]
"""Told of an environment, how many of how many samples are finished and, when all are, their mean
reward: before that it would be too high, as short answers finish first and are more often right."""


@dataclass(frozen=True)
class Measured:
    """All samples of one checkpoint."""

    name: str
    drawn: jobs.TasksDrawn
    samples: list[list[list[jobs.Sample]]]
    """[environments][tasks][samples]"""


async def measure(
    wanted: Evaluation, folder: Path, out: Path, machine: Machine, show: Show
) -> Measured:
    """Evaluate the checkpoint in an absolute folder, resuming `out`; raises `UserError`."""
    setup = jobs.EvaluationSetup(
        folder=str(folder),
        environments=wanted.environments,
        allowed=tuple(each.name for each in wanted.environments),
        engine=machine.engine,
        hardware=machine.hardware,
    )
    async with LocalCompute().child(
        SERVICE,
        setup,
        name="evaluation",
        interpreter=machine.interpreter,
        start_deadline_seconds=jobs.EVALUATION_START_SECONDS,
    ) as child:
        drawn = await draw(child, wanted)
        with (
            closing(Ungradable(out.with_suffix(".ungradable.jsonl"), wanted.ungradable_max)) as bad,
            open_samples(out, head_of(wanted, drawn)) as file,
        ):
            for label, rows in zip(wanted.labels, drawn.rows, strict=True):
                if rows is not None:
                    bad.add_rows(label, rows)
            for index in range(len(wanted.environments)):
                await _play(wanted, index, drawn, child, file, show, bad)
            return Measured(folder.name, drawn, _in_order(wanted, drawn, file.samples))


def head_of(wanted: Evaluation, drawn: jobs.TasksDrawn) -> dict[str, Any]:
    """All that a sample depends on. More tasks may be evaluated later, with the same head."""
    return {
        "checkpoint": drawn.checkpoint,
        "environments": [
            {"name": each.name, "version": each.version, "options": each.options}
            for each in wanted.environments
        ],
        "split": wanted.split,
        "seed": wanted.seed,
        "samples": wanted.samples,
        "temperature": wanted.temperatures,
        "greedy": wanted.greedy,
        "max_new_tokens": drawn.max_new_tokens,
        "stop_ids": drawn.stop_ids,
        "engine": drawn.engine,
    }


async def _play(
    wanted: Evaluation,
    index: int,
    drawn: jobs.TasksDrawn,
    child: Child,
    file: SampleFile,
    show: Show,
    ungradable: Ungradable,
) -> None:
    total = drawn.tasks[index] * wanted.samples
    rewards = {
        each.row: each.reward
        for each in file.samples
        if each.environment == index and each.row < total and not each.problem
    }
    label = wanted.labels[index]

    def report() -> None:
        done = len(rewards)
        show(label, done, total, sum(rewards.values()) / total if done == total else None)

    report()
    rows = [row for row in range(total) if row not in rewards]
    if not rows:
        return
    async for sample in play_rows(child, wanted, drawn, index, rows):
        file.append(sample)
        ungradable.add(label, sample, sum(drawn.tasks) * wanted.samples)
        rewards[sample.row] = sample.reward
        report()


def _in_order(
    wanted: Evaluation, drawn: jobs.TasksDrawn, samples: list[jobs.Sample]
) -> list[list[list[jobs.Sample]]]:
    by_row = {(each.environment, each.row): each for each in samples}
    return [
        [
            [by_row[index, task * wanted.samples + each] for each in range(wanted.samples)]
            for task in range(tasks)
        ]
        for index, tasks in enumerate(drawn.tasks)
    ]
