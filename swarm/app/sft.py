"""`swarm sft`: supervised fine-tuning on this machine, in a child process.

It needs no network. The trainer's package provides the child.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import UserError
from swarm.jobs.offline import StartTuning, Tune, TuningService, TuningSettings, Validate
from swarm.jobs.training import Export
from swarm.manifest import EnvironmentReference
from swarm.world import client
from swarm.world.compute import LocalCompute

SERVICE = "peers.trainer.supervised:SftService"


@dataclass(frozen=True)
class SftOptions:
    """Options of the command."""

    model: Path
    out: Path
    data: Path | None
    environment: str | None
    environment_options: dict[str, Any]
    settings: TuningSettings
    report_every: int


async def run_sft(options: SftOptions, say: Callable[[dict[str, Any]], None]) -> None:
    """Fine-tune a policy and write the result.

    Calls `say` with an event at the start, every `report_every` steps, and at the end. Raises
    `UserError` for wrong options.
    """
    if (options.data is None) == (options.environment is None):
        raise UserError("give either --data FILE or --environment NAME@VERSION")
    name, _, version = (options.environment or "").partition("@")
    if options.environment is not None and not version:
        raise UserError(
            f"--environment is {options.environment!r}; write it as NAME@VERSION, for example "
            "sort-digits@1"
        )
    if options.out.exists():
        raise UserError(f"--out {options.out} exists already; choose another folder")
    job = StartTuning(
        model=str(options.model.resolve()),
        settings=options.settings,
        data=str(options.data.resolve()) if options.data else "",
        environment=EnvironmentReference(
            name=name, version=version, options=options.environment_options
        )
        if name
        else None,
    )
    async with LocalCompute().child(SERVICE, name="sft") as child:
        service = client(TuningService, child)
        started = await service.start(job)

        async def validate(step: int) -> None:
            found = await service.validate(Validate())
            say({"event": "validated", "step": step, **msgspec.to_builtins(found)})

        say({"event": "started", **msgspec.to_builtins(started)})
        await validate(0)
        tokens, began = 0, time.monotonic()
        for step in range(1, options.settings.steps + 1):
            made = await service.step(Tune())
            tokens += made.tokens
            if step % options.report_every == 0 or step == options.settings.steps:
                speed = tokens / max(1e-9, time.monotonic() - began)
                figures = msgspec.to_builtins(made)
                say({"event": "trained", **figures, "tokens_per_second": speed})
                await validate(step)
                tokens, began = 0, time.monotonic()
        await service.save(Export(folder=str(options.out.absolute())))
        say({"event": "saved", "folder": str(options.out)})
