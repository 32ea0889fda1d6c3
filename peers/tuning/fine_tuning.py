"""`swarm sft` and `swarm dpo`: fine-tuning on this machine, in a child process.

They need no network. The trainer's package provides the child.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import UserError
from swarm.jobs.offline import (
    TUNING_START_SECONDS,
    Reading,
    SaveState,
    StartTuning,
    Tune,
    TuningService,
    TuningSettings,
    Validate,
)
from swarm.jobs.training import Export
from swarm.wire.manifest import EnvironmentReference
from swarm.world import client
from swarm.world.compute import LocalCompute

SERVICE = "peers.tuning.service:Tuning"


@dataclass(frozen=True)
class TuningOptions:
    """Options of the commands."""

    model: Path
    out: Path
    data: Path | None
    settings: TuningSettings
    reading: Reading
    report_every: int
    save_every: int
    """0: the state is never saved, so an interrupted tuning begins anew."""
    environment: str | None = None
    environment_options: dict[str, Any] | None = None

    @property
    def state(self) -> Path:
        """The folder of the state to resume from."""
        return self.out.with_name(self.out.name + ".state")


async def tune(options: TuningOptions, say: Callable[[dict[str, Any]], None]) -> None:
    """Fine-tune a policy and write the result, resuming from a saved state.

    Calls `say` with an event at the start, every `report_every` steps, and at the end. Raises
    `UserError` for wrong options.
    """
    job = _job(options)
    async with LocalCompute().child(
        SERVICE, name="fine-tuning", start_deadline_seconds=TUNING_START_SECONDS
    ) as child:
        service = client(TuningService, child)
        started = await service.start(job)

        async def validate(step: int) -> None:
            found = await service.validate(Validate())
            say({"event": "validated", "step": step, **msgspec.to_builtins(found)})

        say({"event": "started", **msgspec.to_builtins(started)})
        await validate(started.steps_done)
        tokens, began = 0, time.monotonic()
        last = options.settings.steps
        for step in range(started.steps_done + 1, last + 1):
            made = await service.step(Tune())
            tokens += made.tokens
            if step % options.report_every == 0 or step == last:
                speed = tokens / max(1e-9, time.monotonic() - began)
                figures = msgspec.to_builtins(made)
                say({"event": "trained", **figures, "tokens_per_second": speed})
                await validate(step)
                tokens, began = 0, time.monotonic()
            if options.save_every and step % options.save_every == 0 and step < last:
                await service.save_state(SaveState(folder=str(options.state.absolute())))
        await service.save(Export(folder=str(options.out.absolute())))
        shutil.rmtree(options.state, ignore_errors=True)
        say({"event": "saved", "folder": str(options.out)})


def _job(options: TuningOptions) -> StartTuning:
    """The child's first job; raises `UserError` for options that do not go together."""
    if (options.data is None) == (options.environment is None):
        raise UserError("give either --data FILE or --environment NAME@VERSION")
    name, _, version = (options.environment or "").partition("@")
    if options.environment is not None and not version:
        raise UserError(
            f"--environment is {options.environment!r}; write it as NAME@VERSION, for example "
            "sort-digits@1"
        )
    if options.environment is not None and options.reading != Reading():
        raise UserError(
            "--environment gives its own examples; leave out the options that read --data "
            "(--split, --prompt-column, --answer-column, --chat, --reward)"
        )
    if options.out.exists():
        raise UserError(f"--out {options.out} exists already; choose another folder")
    return StartTuning(
        model=str(options.model.resolve()),
        settings=options.settings,
        data=str(options.data.resolve()) if options.data else "",
        reading=options.reading,
        environment=EnvironmentReference(
            name=name, version=version, options=options.environment_options or {}
        )
        if name
        else None,
        state=str(options.state.resolve()) if options.state.exists() else "",
    )
