"""`swarm train`: pre-train a model, alone or with others by a library."""

from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import typer

from peers.models.find import FORMS, find_model
from swarm.errors import UserError
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import AsJson, Home, Weights, absolute, explained
from swarm.terminal.output import say_event, say_json

OPTIMISER = "optimiser."
"""Beginning of the settings of a run's table `[optimiser]` in --set."""


class BackendName(StrEnum):
    hivemind = "hivemind"


@exits
@explained(__file__, FORMS=FORMS)
def train(
    context: typer.Context,
    model: str,
    data: list[str],
    out: Path,
    weight: Weights = None,
    backend: BackendName | None = None,
    name: str = "training",
    join: list[str] | None = None,
    key_file: Path = Path("~/.swarm/averaging.key"),
    host: str = "127.0.0.1",
    port: int = 0,
    trainers: int = 2,
    index: int = 1,
    wait: float = 60.0,
    home: Home = Path("~/.swarm"),
    fresh: bool = False,
    steps: int = 1000,
    inner_steps: int = 100,
    batch: int = 32,
    sequence_tokens: int = 1024,
    learning_rate: float = 3e-4,
    outer_learning_rate: float = 1.0,
    outer_momentum: float = 0.0,
    settings: list[str] | None = None,
    seed: int = 0,
    device: str = "auto",
    resume: bool = False,
    as_json: AsJson = False,
) -> None:
    """Pre-train a model: alone without a network, or with others by a library."""
    require_extra("train", "swarm train")

    folder = str(find_model(model, "--model", weights=not fresh).folder.absolute())
    if backend is None:
        _check_alone(context)
    elif index > trainers:
        raise UserError(f"--index is {index}, but --trainers is {trainers}; count them from 1")
    from peers.outer.alone.averaging import open_backend
    from peers.outer.alone.training import Plan, TrainOptions, rounds_of, run_train
    from peers.outer.settings import ReplicaSettings
    from swarm.commands.start import become_rank
    from swarm.jobs.averaging import AveragingSetup
    from swarm.jobs.outer import OuterSetup, StartReplica
    from swarm.settings import from_line, values_of
    from swarm.terminal.tables import struct_from_mapping
    from swarm.wire.manifest import Optimiser

    become_rank(["replica"])
    for flag, number, least in (("batch", batch, 1), ("sequence-tokens", sequence_tokens, 2)):
        if number < least:
            raise UserError(f"--{flag} is {number}; it must be at least {least}")
    own = from_line(
        "replica",
        ReplicaSettings,
        [each for each in settings or () if not each.startswith(OPTIMISER)],
        {
            "model": folder,
            "data": [absolute(each) for each in data],
            "weights": weight or [],
            "sequence_tokens": sequence_tokens,
            "batch_sequences": batch,
            "seed": seed,
            "device": device,
        },
    )
    if not 0 < learning_rate < 1:
        raise UserError(f"--learning-rate is {learning_rate}; it must be above 0 and below 1")
    given = values_of([each for each in settings or () if each.startswith(OPTIMISER)])
    table = {
        "learning_rate": learning_rate,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "gradient_norm_max": 1.0,
        "warmup_steps": 100,
        "learning_rate_schedule": "wsd",
        "decay_share": 0.2,
        "final_learning_rate_share": 0.0,
        **{each.removeprefix(OPTIMISER): value for each, value in given.items()},
    }
    optimiser = struct_from_mapping(Optimiser, table, "--set optimiser")
    job = own.filled(
        StartReplica,
        trainer="alone",
        inner=own.inner(optimiser),
        sharding=own.sharding,
        run=out.name,
        inner_steps=inner_steps,
        rounds=rounds_of(steps, inner_steps),
        compression="fp32",
    )
    averaging = None
    if backend is not None:
        network = AveragingSetup(
            run=name,
            join=tuple(join or ()),
            host=host,
            port=port,
            trainers=trainers,
            wait_seconds=wait,
        )
        folder_of_backends = home.expanduser().absolute()
        averaging = open_backend(
            backend.value, network, folder_of_backends, key_file.expanduser().absolute(), index
        )
        everyone = tuple(f"trainer-{number:04}" for number in range(1, trainers + 1))
        job = msgspec.structs.replace(job, trainer=everyone[index - 1], trainers=everyone)
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
    for name in ("name", "join", "key_file", "host", "port", "trainers", "index", "wait", "home"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise UserError(f"--{option} is for --backend hivemind; add --backend, or remove it")
