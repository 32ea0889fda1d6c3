"""`swarm demo`: a whole swarm on this machine."""

from pathlib import Path
from typing import Annotated

import trio
import typer

from peers.models.find import FORMS
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.options import EnvironmentOptions, environment_options


@exits
def demo(
    model: Annotated[
        str | None,
        typer.Option(help=f"A model to train instead of a small one made here: {FORMS}."),
    ] = None,
    environment: Annotated[
        str, typer.Option(help="What to learn: a demo (docs/environments.md), or an environment.")
    ] = "sort-digits",
    option: EnvironmentOptions = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Rollout steps; by default 250, in two minutes or more, with --model 40, in 15."
        ),
    ] = None,
    peers: Annotated[
        int | None, typer.Option(help="Number of inference peers; by default 3, with --model 2.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the base policy and the trainer.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for results, logs, and the peers' keys and state.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for the summary as well; - prints it.")
    ] = None,
    cheat: Annotated[
        str | None,
        typer.Option(
            help="How one inference peer cheats: wrong-weights (altered a little) or int8 (rounded)"
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="A line per step instead of the live view.")
    ] = False,
) -> int:
    """Run a whole swarm on this machine, which learns a small task, by default to sort six digits.

    One bootstrap peer, two relays, a trainer, a validator and inference peers start as separate
    processes. Results go to ./demo-output (or --keep): the trained policy as a Hugging Face
    folder, the reward curve, a summary. Ctrl-C ends everything. With --model a real model learns
    the task in a chat, by LoRA."""
    require_extra("train", "swarm demo")
    require_extra("plots", "swarm demo")
    from peers.demo.play import run_demo
    from peers.demo.setup import DemoOptions

    options = DemoOptions(
        model=model,
        environment=environment,
        environment_options=environment_options(option),
        steps=steps,
        peers=peers if peers is not None else 3 if model is None else 2,
        seed=seed,
        keep=keep,
        json_file=json_file,
        cheat=cheat,
        plain=plain,
    )
    return trio.run(run_demo, options)  # it handles signals itself
