"""`swarm sft`: fine-tune a policy on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.app.exit import exits
from swarm.app.extras import require_extra
from swarm.app.interrupt import run_until_interrupted
from swarm.app.options import AsJson, EnvironmentOptions, environment_options
from swarm.app.output import say_event, say_json


@exits
def sft(
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the policy to start from.")],
    out: Annotated[Path, typer.Option(help="New folder for the result.")],
    data: Annotated[
        Path | None, typer.Option(help='JSON lines, each {"prompt": text, "answer": text}.')
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(help="Environment, as NAME@VERSION: learn the answers to its training tasks."),
    ] = None,
    option: EnvironmentOptions = None,
    steps: Annotated[int, typer.Option(help="Number of optimiser steps.")] = 100,
    batch: Annotated[int, typer.Option(help="Examples per step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-5,
    warmup_steps: Annotated[
        int, typer.Option(help="Steps of warm-up; the rate then falls by a cosine to a tenth.")
    ] = 10,
    validation_share: Annotated[
        float, typer.Option(help="Share of the examples held back for validation.")
    ] = 0.05,
    tokens_max: Annotated[
        int, typer.Option(help="Longest example in tokens; longer ones are left out.")
    ] = 8192,
    seed: Annotated[int, typer.Option(help="Seed of the order of the examples.")] = 0,
    report_every: Annotated[int, typer.Option(min=1, help="Steps between two reports.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a policy on prompts with answers, as a warm-up before RL. Needs no network."""
    require_extra("train", "swarm sft")
    from swarm.app.sft import SftOptions, run_sft
    from swarm.jobs.offline import TuningSettings

    options = SftOptions(
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
        report_every=report_every,
    )
    run_until_interrupted(run_sft, options, say_json if as_json else say_event)
