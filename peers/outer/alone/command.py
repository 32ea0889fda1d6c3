"""`swarm train`: pre-train a model, alone or with others by a library."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from peers.models.find import FORMS, find_model
from swarm.errors import UserError
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import AsJson, Weights, absolute
from swarm.terminal.output import say_event, say_json


class BackendName(StrEnum):
    hivemind = "hivemind"


@exits
def train(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=f"The model to start from: {FORMS}.")],
    data: Annotated[
        list[str],
        typer.Option(
            help="File or folder to train on, or its https://, s3://, gs:// or hf:// address; "
            "repeatable: text, or JSON lines or Parquet with a column text."
        ),
    ],
    out: Annotated[Path, typer.Option(help="New folder for states and result.")],
    weight: Weights = None,
    backend: Annotated[
        BackendName | None,
        typer.Option(
            help="Library by which trainers exchange what they learned, on a network where all "
            "trust each other. Default: this one trains alone."
        ),
    ] = None,
    run: Annotated[
        str, typer.Option(help="hivemind: a name of the training, the same for all its trainers.")
    ] = "training",
    join: Annotated[
        list[str] | None,
        typer.Option(
            help="hivemind: multiaddress of another trainer, repeatable; none for the first."
        ),
    ] = None,
    key: Annotated[
        Path,
        typer.Option(
            help="hivemind: file with the training's key, the same for all its trainers, who "
            "answer nobody else; made if it is missing."
        ),
    ] = Path("~/.swarm/averaging.key"),
    host: Annotated[
        str, typer.Option(help="Address at which the other trainers reach this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for them; 0: any.")] = 0,
    trainers: Annotated[
        int, typer.Option(min=1, max=1000, help="Trainers, among whom the data is divided.")
    ] = 2,
    trainer: Annotated[
        int, typer.Option(min=1, help="Number of this trainer, from 1 to --trainers.")
    ] = 1,
    wait: Annotated[
        float, typer.Option(min=1.0, max=1200.0, help="Seconds to wait for the other trainers.")
    ] = 60.0,
    backends: Annotated[
        Path, typer.Option(help="Folder where `swarm backend install` puts backends.")
    ] = Path("~/.swarm"),
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
    sequence_tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
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
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Further setting of \\[replica] as NAME=VALUE, such as "
            "activation_checkpointing=true; repeatable.",
        ),
    ] = None,
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
    """Pre-train a model: alone without a network, or with others by a library."""
    require_extra("train", "swarm train")

    folder = str(find_model(model, "--model", weights=not fresh).folder.absolute())
    if backend is None:
        _check_alone(context)
    elif trainer > trainers:
        raise UserError(
            f"--trainer is {trainer}, but --trainers is {trainers}; number the trainers from 1"
        )
    from peers.outer.alone.averaging import open_backend
    from peers.outer.alone.training import Plan, TrainOptions, rounds_of, run_train
    from peers.outer.settings import ReplicaSettings
    from swarm.commands.start import become_rank
    from swarm.jobs.averaging import AveragingSetup
    from swarm.jobs.outer import OuterSetup, StartReplica
    from swarm.settings import from_line
    from swarm.wire.manifest import Optimiser

    become_rank(["replica"])
    for flag, number, least in (
        ("batch", batch, 1),
        ("sequence-tokens", sequence_tokens, 2),
        ("z-loss", z_loss, 0),
        ("validation", validation, 0),
    ):
        if number < least:
            raise UserError(f"--{flag} is {number}; it must be at least {least}")
    own = from_line(
        "replica",
        ReplicaSettings,
        settings or [],
        {
            "model": folder,
            "data": [absolute(each) for each in data],
            "weights": weight or [],
            "sequence_tokens": sequence_tokens,
            "batch_sequences": batch,
            "z_loss": z_loss,
            "validation_sequences": validation,
            "seed": seed,
            "device": device,
            "threads": threads,
        },
    )
    optimiser = Optimiser(
        learning_rate=learning_rate,
        beta2=0.95,
        weight_decay=weight_decay,
        gradient_norm_max=1.0,
        warmup_steps=warmup_steps,
        learning_rate_schedule="wsd",
        decay_share=decay_share,
        final_learning_rate_share=0.0,
    )
    job = StartReplica(
        model=folder,
        trainer="alone",
        seed=seed,
        inner=own.inner(optimiser),
        sharding=own.sharding,
        dtype=own.dtype,
        attention=own.attention,
        memory_check=own.memory_check,
        tensorboard=own.tensorboard,
        wandb=own.wandb,
        run=out.name,
        inner_steps=inner_steps,
        rounds=rounds_of(steps, inner_steps),
        compression="fp32",
    )
    averaging = None
    if backend is not None:
        network = AveragingSetup(
            run=run,
            join=tuple(join or ()),
            host=host,
            port=port,
            trainers=trainers,
            wait_seconds=wait,
        )
        folder_of_backends = backends.expanduser().absolute()
        averaging = open_backend(
            backend.value, network, folder_of_backends, key.expanduser().absolute(), trainer
        )
        everyone = tuple(f"trainer-{number:04}" for number in range(1, trainers + 1))
        job = msgspec.structs.replace(job, trainer=everyone[trainer - 1], trainers=everyone)
    options = TrainOptions(
        out=out,
        resume=resume,
        setup=OuterSetup(hardware=own.hardware),
        plan=Plan(
            job=job,
            outer_learning_rate=outer_learning_rate,
            outer_momentum=outer_momentum,
            fresh=fresh,
        ),
        backend=averaging,
    )
    say: Any = say_json if as_json else say_event
    run_until_interrupted(run_train, options, say)


def _check_alone(context: typer.Context) -> None:
    """Raise `UserError` for an option that only a training with a library's backend has."""
    for name in ("run", "join", "key", "host", "port", "trainers", "trainer", "wait", "backends"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"--{name} is for --backend hivemind; add --backend, or remove it")
