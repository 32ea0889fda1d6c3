"""`swarm demo`: a whole swarm on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import trio
import typer

from swarm.errors import UserError
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra


@exits
def demo(
    environment: Annotated[
        str, typer.Option(help="What to learn; see docs/environments.md for the choices.")
    ] = "sort-digits",
    steps: Annotated[int, typer.Option(help="Rollout steps; 250 take two minutes or more.")] = 250,
    peers: Annotated[int, typer.Option(help="Number of inference peers.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the base policy and the trainer.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for results, logs, and the peers' keys and state.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for the summary as well; - prints it.")
    ] = None,
    cheat: Annotated[
        str | None, typer.Option(help="wrong-weights: one inference peer runs altered weights.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="A line per step instead of the live view.")
    ] = False,
) -> int:
    """Run a whole swarm on this machine, which learns a small task, by default to sort six digits.

    One bootstrap peer, two relays, a trainer, a validator and inference peers start as separate
    processes. Results go to ./demo-output (or --keep): the trained policy as a Hugging Face
    folder, the reward curve, a summary. Ctrl-C ends everything.
    """
    if cheat not in (None, "wrong-weights"):
        raise UserError(f"--cheat is {cheat!r}; the only choice is wrong-weights")
    require_extra("train", "swarm demo")
    require_extra("plots", "swarm demo")
    from peers.demo.running import run_demo
    from peers.demo.setup import DemoOptions

    options = DemoOptions(
        age_seconds=_seconds_since_start(),
        environment=environment,
        steps=steps,
        peers=peers,
        seed=seed,
        keep=keep,
        json_file=json_file,
        cheat=cheat is not None,
        plain=plain,
    )
    return trio.run(run_demo, options)  # it handles signals itself


def _seconds_since_start() -> float:
    """Return the age of this process in seconds; 0 on a system without `/proc`."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
