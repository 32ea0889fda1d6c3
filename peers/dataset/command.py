"""`swarm dataset`: choose the tasks of a run."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from blake3 import blake3

from swarm.errors import UserError
from swarm.jobs.offline import (
    DescribePolicy,
    FilterService,
    FilterSetup,
    MeasuredTask,
    MeasureTasks,
)
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
from swarm.terminal.strict_json import to_json
from swarm.world import client
from swarm.world.compute import LocalCompute

# `swarm dataset filter`: keep the tasks that a policy solves sometimes.
#
# The results are a file of JSON lines: first the settings and the policy that they depend on, then
# one line per task, in order. Only complete lines count, so an interrupted run can be resumed.


class ResponseFile:
    """JSON lines of responses, in the order of the tasks."""

    def __init__(self, path: Path, kept: int, shared: Mapping[str, Any]) -> None:
        """Begin or resume a file that has the responses of `kept` attempts.

        `shared` are the fields that all records have. Raises `UserError`.
        """
        self._path, self._shared = path, dict(shared)
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            if len([line for line in lines[:kept] if line.endswith(b"\n")]) < kept:
                raise UserError(
                    f"--responses {path} has fewer responses than the {kept} attempts of --out; "
                    "choose another --out to begin anew"
                )
            if kept == 0 and lines:
                raise UserError(f"--responses {path} exists; choose another file, or remove it")
            self._file = path.open("ab")
            self._file.truncate(sum(map(len, lines[:kept])))
        except OSError as error:
            raise UserError(
                f"--responses {path} cannot be written ({error.strerror}); choose another file"
            ) from error

    def add(self, row: MeasuredTask) -> None:
        """Append the attempts at a task; raises `UserError` on a full disk."""
        lines = [
            to_json({**record_of(row), **self._shared, **response}) + "\n"
            for response in _responses(row)
        ]
        try:
            self._file.write("".join(lines).encode())
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"--responses {self._path} cannot be written ({error.strerror}); free some space "
                "and give the same command"
            ) from error

    def close(self) -> None:
        """Make the file durable."""
        with suppress(OSError):
            os.fsync(self._file.fileno())
        self._file.close()


def record_of(row: MeasuredTask) -> dict[str, Any]:
    """The task's record; of another environment than `genesys`, one made from the task."""
    data = row.data
    info = data.get("verification_info")
    return {
        "problem_id": data.get("problem_id", row.seed),
        "source": data.get("source", ""),
        "task_type": data.get("task_type", ""),
        "in_source_id": data.get("in_source_id"),
        "prompt": row.prompt,
        "gold_standard_solution": row.answer,
        "verification_info": to_json(info if info is not None else data),
        "metadata": to_json(data.get("metadata", {})),
    }


def _responses(row: MeasuredTask) -> list[dict[str, Any]]:
    return [
        {
            "llm_response": attempt.text,
            "response_id": blake3(f"{row.seed}/{number}".encode()).hexdigest(length=16),
            "score": attempt.reward,
            "finished": attempt.finished,
        }
        for number, attempt in enumerate(row.responses)
    ]


SERVICE = "peers.dataset.service:DatasetService"
TASKS_AT_ONCE = 32

FORMAT = 3


@dataclass(frozen=True)
class Filtering:
    """Settings of one filtering; the first line of the results records all but `tasks`."""

    policy: Path
    environment: str
    version: str
    options: dict[str, Any]
    """Options of the environment."""
    attempts: int
    low: float
    high: float
    tasks: int
    """Tasks to try."""
    seed: int
    temperature: float
    max_new_tokens: int


@dataclass
class Progress:
    """Counts of tasks tried, tasks kept, and tasks to try, which may turn out to be fewer."""

    tried: int = 0
    kept: int = 0
    total: int = 0


def parse_bounds(text: str) -> tuple[float, float]:
    """Read two ascending shares, like `0.125:0.5`; raises `UserError`."""
    low, _, high = text.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = (1.0, 0.0)
    if not 0 <= bounds[0] <= bounds[1] <= 1:
        raise UserError(f"--keep is {text!r}; it must be two shares in order, like 0.125:0.5")
    return bounds


async def filter_tasks(
    wanted: Filtering,
    out: Path,
    show: Callable[[Progress], None],
    responses: Path | None = None,
) -> Progress:
    """Try the tasks and write `out`, resuming an existing file; raises `UserError`.

    `responses`: a file for the texts of all attempts.
    """
    setup = FilterSetup(
        policy=str(wanted.policy),
        environment=wanted.environment,
        version=wanted.version,
        options=wanted.options,
    )
    async with LocalCompute().child(SERVICE, setup, name="dataset filter") as child:
        service = client(FilterService, child)
        policy = await service.describe(DescribePolicy(max_new_tokens=wanted.max_new_tokens))
        head = {"format": FORMAT, **asdict(wanted), **msgspec.structs.asdict(policy)}
        del head["tasks"], head["unusable"]  # more may be tried later
        if policy.unusable:
            _warn(policy.unusable)
        progress = _resume(out, head)
        progress.total = wanted.tasks
        kept = _response_file(responses, wanted, policy.policy, progress.tried)
        with out.open("a", encoding="utf-8") as file:
            while progress.tried < wanted.tasks:
                show(progress)
                job = _tasks(wanted, policy.stop_ids, progress.tried, responses is not None)
                rows = (await service.measure(job)).rows
                for task in rows:
                    if kept is not None:
                        kept.add(task)
                    row = msgspec.structs.asdict(task)
                    del row["data"], row["responses"]
                    share = row["passes"] / wanted.attempts
                    row["kept"] = not task.problem and wanted.low <= share <= wanted.high
                    if task.problem:
                        _warn(f"task {task.index} is not kept: {task.problem}")
                    progress.tried += 1
                    progress.kept += row["kept"]
                    file.write(json.dumps(row) + "\n")
                file.flush()
                if len(rows) < job.count:  # there are no others
                    progress.total = progress.tried
                    break
        if kept is not None:
            kept.close()
        show(progress)
        return progress


def _warn(sentence: str) -> None:
    print(f"\nwarning: {sentence}", file=sys.stderr)


def _response_file(
    path: Path | None, wanted: Filtering, policy: str, tried: int
) -> ResponseFile | None:
    if path is None:
        return None
    shared = {
        "model_name": f"{wanted.policy.name}@{policy[:16]}",
        "generation_config": to_json(
            {
                "temperature": wanted.temperature,
                "max_new_tokens": wanted.max_new_tokens,
                "seed": wanted.seed,
            }
        ),
        "machine_info": to_json({"system": platform.system(), "machine": platform.machine()}),
    }
    return ResponseFile(path, tried * wanted.attempts, shared)


def _tasks(wanted: Filtering, stop_ids: list[int], first: int, responses: bool) -> MeasureTasks:
    return MeasureTasks(
        seed=wanted.seed,
        first=first,
        count=min(TASKS_AT_ONCE, wanted.tasks - first),
        attempts=wanted.attempts,
        temperature=wanted.temperature,
        max_new_tokens=wanted.max_new_tokens,
        stop_ids=stop_ids,
        responses=responses,
    )


def _resume(out: Path, head: dict[str, Any]) -> Progress:
    """Read the results so far. Starts a missing file and drops an incomplete last line."""
    progress = Progress()
    expected = json.dumps(head, default=str, sort_keys=True)
    try:
        raw = out.read_bytes() if out.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw) or not whole:
            out.write_bytes(whole or expected.encode() + b"\n")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror})") from error
    if not whole:
        return progress
    lines = whole.decode("utf-8", "replace").splitlines()
    if lines[0] != expected:
        raise UserError(
            f"--out {out} holds the results of another policy, environment or setting; "
            "choose another file, or remove it to begin anew"
        )
    for line in lines[1:]:
        row = json.loads(line)
        progress.tried += 1
        progress.kept += row["kept"]
    return progress


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
