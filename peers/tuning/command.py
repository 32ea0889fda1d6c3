"""`swarm sft` and `swarm dpo`: fine-tune a policy on this machine."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from peers.models.find import FORMS, find_model
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
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import AsJson, EnvironmentOptions, environment_options
from swarm.terminal.output import say_event, say_json
from swarm.wire.manifest import EnvironmentReference
from swarm.world import client
from swarm.world.compute import LocalCompute

# `swarm sft` and `swarm dpo`: fine-tuning on this machine, in a child process.
#
# They need no network. The trainer's package provides the child.

SERVICE = "peers.tuning.service:Tuning"


@dataclass(frozen=True)
class TuningOptions:
    """Options of the commands."""

    model: str
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
        model=str(find_model(options.model, "--model").folder.resolve()),
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


Model = Annotated[str, typer.Option(help=f"The policy to start from: {FORMS}.")]
Out = Annotated[Path, typer.Option(help="New folder for the result.")]
Split = Annotated[
    str | None, typer.Option(help="Of a folder with several splits, the one to read; else train.")
]
PromptColumn = Annotated[
    str, typer.Option(help="Column with the prompt: text, or a list of messages.")
]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Make each prompt of text a message, for the chat template."),
]
Steps = Annotated[int, typer.Option(help="Number of optimiser steps.")]
Batch = Annotated[int, typer.Option(help="Examples, or pairs, per step.")]
Rate = Annotated[float, typer.Option(help="Highest learning rate.")]
Warmup = Annotated[
    int, typer.Option(help="Steps of warm-up; the rate then falls by a cosine to a tenth.")
]
Held = Annotated[float, typer.Option(help="Share of the examples held back for validation.")]
Longest = Annotated[int, typer.Option(help="Longest example in tokens; longer ones are left out.")]
Seed = Annotated[int, typer.Option(help="Seed of the order of the examples.")]
Report = Annotated[int, typer.Option(min=1, help="Steps between two reports.")]
Save = Annotated[
    int, typer.Option(min=0, help="Steps between two saves of the state to resume; 0: none.")
]


@exits
def sft(
    model: Model,
    out: Out,
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines, Parquet, Arrow, or a Hugging Face folder of them: prompts with "
            "answers, chats, or exported rollouts."
        ),
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(help="Environment, as NAME@VERSION: learn the answers to its training tasks."),
    ] = None,
    option: EnvironmentOptions = None,
    split: Split = None,
    prompt_column: PromptColumn = "prompt",
    answer_column: Annotated[str, typer.Option(help="Column with the answer's text.")] = "answer",
    chat: Chat = False,
    reward: Annotated[
        str | None,
        typer.Option(help="Of rollouts and solutions, learn those with a reward in LOW:HIGH."),
    ] = None,
    steps: Steps = 100,
    batch: Batch = 32,
    learning_rate: Rate = 1e-5,
    warmup_steps: Warmup = 10,
    validation_share: Held = 0.05,
    tokens_max: Longest = 8192,
    seed: Seed = 0,
    report_every: Report = 10,
    save_every: Save = 200,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a policy on prompts with answers. Needs no network.

    The loss is on the answers alone. The same command resumes an interrupted tuning.
    """
    require_extra("train", "swarm sft")
    from swarm.jobs.offline import Reading, TuningSettings
    from swarm.look.rollouts.filters import parse_range

    options = TuningOptions(
        model=model,
        out=out,
        data=data,
        environment=environment,
        environment_options=environment_options(option),
        settings=TuningSettings(
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            validation_share=validation_share,
            tokens_max=tokens_max,
            seed=seed,
        ),
        reading=Reading(
            split=split,
            prompt_column=prompt_column,
            answer_column=answer_column,
            chat=chat,
            reward=parse_range("--reward", reward, "1:") or (-math.inf, math.inf),
        ),
        report_every=report_every,
        save_every=save_every,
    )
    _run(options, as_json)


@exits
def dpo(
    model: Model,
    out: Out,
    data: Annotated[
        Path,
        typer.Option(
            help="JSON lines, Parquet, Arrow, or a Hugging Face folder of them: prompts with "
            "chosen and rejected answers, a teacher's solutions, or exported rollouts."
        ),
    ],
    beta: Annotated[
        float, typer.Option(help="How strongly the policy is held to the one it starts from.")
    ] = 0.1,
    answer_weight: Annotated[
        float, typer.Option(help="Weight of the chosen answers' own loss, as in SFT.")
    ] = 0.0,
    split: Split = None,
    prompt_column: PromptColumn = "prompt",
    chat: Chat = False,
    steps: Steps = 100,
    batch: Batch = 32,
    learning_rate: Rate = 1e-6,
    warmup_steps: Warmup = 10,
    validation_share: Held = 0.05,
    tokens_max: Longest = 8192,
    seed: Seed = 0,
    report_every: Report = 10,
    save_every: Save = 200,
    as_json: AsJson = False,
) -> None:
    """Teach a policy to prefer one answer to another (DPO). Needs no network.

    Of exported rollouts and of solutions, a prompt's best answer is preferred to its worst. The
    same command resumes an interrupted tuning.
    """
    require_extra("train", "swarm dpo")
    from swarm.jobs.offline import Reading, TuningSettings

    options = TuningOptions(
        model=model,
        out=out,
        data=data,
        settings=TuningSettings(
            loss="preferences",
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            validation_share=validation_share,
            tokens_max=tokens_max,
            beta=beta,
            answer_weight=answer_weight,
            seed=seed,
        ),
        reading=Reading(split=split, prompt_column=prompt_column, chat=chat),
        report_every=report_every,
        save_every=save_every,
    )
    _run(options, as_json)


def _run(options: TuningOptions, as_json: bool) -> None:

    run_until_interrupted(tune, options, say_json if as_json else say_event)
