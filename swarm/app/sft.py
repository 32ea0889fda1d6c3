"""`swarm sft`: supervised fine-tuning on this machine, in a child process.

It needs no network. The trainer's package provides the child.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.world.compute import LocalCompute

SERVICE = "peers.trainer.supervised:SftService"
STEP_SECONDS = 3600.0
"""Deadline of a call: a step of a large model on a slow machine."""


@dataclass(frozen=True)
class SftOptions:
    """Options of the command."""

    model: Path
    out: Path
    data: Path | None
    environment: str | None
    environment_options: dict[str, Any]
    steps: int
    batch: int
    learning_rate: float
    warmup_steps: int
    validation_share: float
    tokens_max: int
    seed: int
    report_every: int


async def run_sft(options: SftOptions, say: Callable[[dict[str, Any]], None]) -> None:
    """Fine-tune and write the result; `say` gets an event at the start, every few steps, and
    at the end.

    Raises `UserError` for mistakes that the person can fix.
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
    settings = asdict(options)
    for key in ("model", "out", "data", "environment", "environment_options", "report_every"):
        del settings[key]
    async with LocalCompute().child(SERVICE, name="sft") as child:

        async def call(method: str, **arguments: Any) -> dict[str, Any]:
            return await child.call(method, arguments, deadline_seconds=STEP_SECONDS)

        started = await call(
            "start",
            model=str(options.model.resolve()),
            settings=settings,
            data=str(options.data.resolve()) if options.data else "",
            environment=name,
            environment_version=version,
            environment_options=options.environment_options,
        )
        say({"event": "started", **started})
        say({"event": "validated", "step": 0, **await call("validate")})
        tokens, began = 0, time.monotonic()
        for step in range(1, options.steps + 1):
            made = await call("step")
            tokens += made["tokens"]
            if step % options.report_every == 0 or step == options.steps:
                speed = tokens / max(1e-9, time.monotonic() - began)
                say({"event": "trained", **made, "tokens_per_second": speed})
                say({"event": "validated", "step": step, **await call("validate")})
                tokens, began = 0, time.monotonic()
        await call("save", folder=str(options.out.absolute()))
        say({"event": "saved", "folder": str(options.out)})
