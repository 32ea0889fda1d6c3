"""lm-eval's tasks in a child process, with progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from peers.evaluation.report import Z_95, aligned
from peers.evaluation.run import Machine, Progress
from swarm.jobs.evaluation import (
    EVALUATION_START_SECONDS,
    AskHarnessProgress,
    HarnessDone,
    HarnessFigure,
    HarnessService,
    HarnessSetup,
    RunHarness,
)
from swarm.world import client
from swarm.world.compute import LocalCompute
from swarm.world.tasks import open_guarded

SERVICE = "peers.evaluation.harness:LmEvalService"
PREFIX = "lm_eval:"

PROGRESS_SECONDS = 1.0


@dataclass(frozen=True)
class HarnessTasks:
    """What to evaluate with lm-eval."""

    names: Sequence[str]
    include: Path | None
    limit: int
    chat: bool


def split_names(text: str | None) -> tuple[str | None, list[str]]:
    """Divide `--tasks` into names of environments (None: none) and of lm-eval's tasks."""
    names = [part.strip() for part in (text or "").split(",")] if text else []
    own = [name for name in names if not name.startswith(PREFIX)]
    return ",".join(own) or None, [
        name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)
    ]


async def run_harness(
    wanted: HarnessTasks,
    folder: Path,
    out: Path,
    machine: Machine,
    show: Callable[[Progress], None],
) -> HarnessDone:
    """Evaluate the checkpoint in an absolute folder, resuming `out`; raises `UserError`."""
    setup = HarnessSetup(folder=str(folder), engine=machine.engine, hardware=machine.hardware)
    found: list[HarnessDone] = []
    async with LocalCompute().child(
        SERVICE,
        setup,
        name="lm-eval",
        interpreter=machine.interpreter,
        start_deadline_seconds=EVALUATION_START_SECONDS,
    ) as child:
        service = client(HarnessService, child)
        job = RunHarness(
            tasks=list(wanted.names),
            include=str(wanted.include) if wanted.include else "",
            limit=wanted.limit,
            chat=wanted.chat,
            out=str(out),
        )

        async def report() -> None:
            while True:
                await trio.sleep(PROGRESS_SECONDS)
                made = await service.progress(AskHarnessProgress())
                if made.total:
                    show(Progress("lm-eval", made.finished, made.total, None))

        async with open_guarded() as guarded:
            guarded.nursery.start_soon(report)
            found.append(await service.evaluate(job))
            guarded.nursery.cancel_scope.cancel()
    return found[0]


def harness_table(
    measured: tuple[str, HarnessDone], base: tuple[str, HarnessDone] | None = None
) -> str:
    """A line per metric, with 95 % intervals by lm-eval's standard errors."""
    columns = [measured] if base is None else [measured, base]
    rows = [["", "documents", *(name for name, _ in columns)]]
    if base is not None:
        rows[0].append("difference")
    others = {(each.task, each.metric): each for each in base[1].figures} if base else {}
    for each in measured[1].figures:
        row = [f"{each.task} {each.metric}", str(each.documents), _shown(each)]
        other = others.get((each.task, each.metric))
        if other is not None:
            row += [_shown(other), f"{each.value - other.value:+.3f} ± {_width(each, other):.3f}"]
        rows.append(row)
    return aligned(rows)


def _shown(figure: HarnessFigure) -> str:
    if figure.standard_error is None:
        return f"{figure.value:.3f}"
    return f"{figure.value:.3f} ± {_width(figure):.3f}"


def _width(*figures: HarnessFigure) -> float:
    return Z_95 * math.hypot(*(each.standard_error or 0.0 for each in figures))
