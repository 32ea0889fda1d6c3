"""`swarm train`: pre-train or fine-tune a model on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.app.exit import exits
from swarm.app.extras import require_extra
from swarm.app.interrupt import run_until_interrupted
from swarm.app.options import AsJson
from swarm.app.output import say_event, say_json


class Objective(StrEnum):
    pretrain = "pretrain"
    sft = "sft"


@exits
def train(
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the model to start from.")],
    data: Annotated[
        list[Path],
        typer.Option(
            help="File or folder to train on; repeatable. pretrain: text, or JSON lines, Parquet "
            'or Arrow with a column text. sft: JSON lines, each {"prompt": text, "answer": text}.'
        ),
    ],
    out: Annotated[Path, typer.Option(help="New folder for states and result.")],
    objective: Annotated[
        Objective, typer.Option(help="pretrain: learn every token. sft: learn the answers only.")
    ] = Objective.pretrain,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Begin with random weights; --model needs config and tokenizer only."
        ),
    ] = False,
    steps: Annotated[int, typer.Option(help="Number of optimiser steps.")] = 1000,
    inner_steps: Annotated[
        int, typer.Option(help="Steps of a round, after which the state is durable.")
    ] = 100,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 32,
    sequence_tokens: Annotated[
        int, typer.Option(help="Tokens of a sequence; of sft, the longest example.")
    ] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 3e-4,
    warmup_steps: Annotated[int, typer.Option(help="Steps of warm-up.")] = 100,
    decay_share: Annotated[
        float, typer.Option(help="Share of the steps at the end, over which the rate falls to 0.")
    ] = 0.2,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay.")] = 0.1,
    z_loss: Annotated[
        float, typer.Option(help="Coefficient of the max-z-loss, which keeps the logits small.")
    ] = 0.0,
    outer_learning_rate: Annotated[
        float, typer.Option(help="Learning rate of the step after each round; 1: plain training.")
    ] = 1.0,
    outer_momentum: Annotated[
        float, typer.Option(help="Nesterov momentum of the step after each round.")
    ] = 0.0,
    validation: Annotated[
        int, typer.Option(help="Sequences held back to measure the loss after each round.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights and of the order of the data.")] = 0,
    device: Annotated[
        str, typer.Option(help="Torch device; auto: a GPU if there is one.")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the training in --out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pre-train or fine-tune a model, alone on this machine. Needs no network."""
    require_extra("train", "swarm train")
    from swarm.app.train import Plan, TrainOptions, rounds_of, run_train
    from swarm.jobs import Hardware
    from swarm.jobs.outer import Inner, OuterSetup, StartReplica
    from swarm.manifest import Optimiser

    inner = Inner(
        objective=objective.value,
        data=[str(each.absolute()) for each in data],
        sequence_tokens=sequence_tokens,
        batch_sequences=batch,
        z_loss=z_loss,
        validation_sequences=validation,
        optimiser=Optimiser(
            learning_rate=learning_rate,
            beta2=0.95,
            weight_decay=weight_decay,
            gradient_norm_max=1.0,
            warmup_steps=warmup_steps,
            learning_rate_schedule="wsd",
            decay_share=decay_share,
            final_learning_rate_share=0.0,
        ),
    )
    job = StartReplica(
        model=str(model.absolute()),
        trainer="alone",
        seed=seed,
        inner=inner,
        inner_steps=inner_steps,
        rounds=rounds_of(steps, inner_steps),
        compression="fp32",
    )
    options = TrainOptions(
        out=out,
        resume=resume,
        setup=OuterSetup(hardware=Hardware(device=device, threads=threads)),
        plan=Plan(
            job=job,
            outer_learning_rate=outer_learning_rate,
            outer_momentum=outer_momentum,
            fresh=fresh,
        ),
    )
    say: Any = say_json if as_json else say_event
    run_until_interrupted(run_train, options, say)
