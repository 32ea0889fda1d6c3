"""`swarm trainer`: what a trainer needs, before it is started."""

from pathlib import Path

import msgspec
import typer

from peers.models.find import FORMS, find_model
from swarm.errors import UserError
from swarm.jobs.memory import MemoryPlan, fullest, total
from swarm.sentences import numbered
from swarm.settings import from_line
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.figures import readable_bytes
from swarm.terminal.options import AsJson, Bootstrap, WhichRun, explained
from swarm.terminal.output import plain, print_json
from swarm.wire.manifest import Schedule

app = typer.Typer(help="The trainer's memory, and its place.", no_args_is_help=True)

GB = 10**9

MEMORY_GB_MAX = 1e6
"""A petabyte: no machine has more, and a plan counts in whole bytes."""

CONTEXT = 1 << 14
"""Tokens of the longest sequence, unless --context or the model says otherwise."""


@app.command("plan")
@exits
@explained(__file__, FORMS=FORMS, CONTEXT=f"{CONTEXT:,}")
def plan_command(
    model: str,
    gpus: int = 1,
    gpus_per_node: int = 8,
    memory_gb: float = 0.0,
    host_memory_gb: float = 0.0,
    context: int | None = None,
    adapter_rank: int = 0,
    settings: list[str] | None = None,
    outer: bool = False,
    device: str = "cuda",
    as_json: AsJson = False,
) -> None:
    """Say what each rank of a trainer holds in memory, whether it fits, and what would fit.

    Exits with 1 if it does not fit."""
    require_extra("train", "swarm trainer plan")
    if device not in ("cuda", "cpu"):
        raise UserError(f"--device is {device!r}; it must be one of cuda, cpu")
    for option, size in (("--memory-gb", memory_gb), ("--host-memory-gb", host_memory_gb)):
        if size > MEMORY_GB_MAX:
            raise UserError(f"{option} is {size:g}; it must be at most {MEMORY_GB_MAX:g}")
    from peers.engines.config import read_text_config
    from peers.learning import plan as planning  # it imports torch
    from peers.outer.settings import ReplicaSettings
    from peers.trainer.settings import TrainerSettings

    path = Path(model)
    is_config = path.name == "config.json" and path.is_file()
    folder = path.parent if is_config else find_model(model, "--model", weights=False).folder
    kind = ReplicaSettings if outer else TrainerSettings
    table = "replica" if outer else "trainer"
    chosen = from_line(table, kind, settings or [], {"model": str(folder)})
    half = chosen.dtype == "bfloat16" or (chosen.dtype == "auto" and device == "cuda")
    positions = read_text_config(folder)["max_position_embeddings"]
    if context is not None and context > positions:
        raise UserError(
            f"--context is {context}; the model reads at most {positions} tokens "
            "(max_position_embeddings in its config.json)"
        )
    longest = context or min(getattr(chosen, "sequence_tokens", CONTEXT), positions)
    machine = planning.Machine(
        device=device,
        ranks=gpus,
        ranks_here=min(gpus, gpus_per_node),
        device_limit=round(memory_gb * GB),
        host_limit=round(host_memory_gb * GB),
    )
    work = planning.of_rounds(chosen.pass_tokens, longest)
    if not outer:
        held, given = Schedule().max_staleness + 2, getattr(chosen, "teacher", "")
        teacher = given and planning.Model(find_model(given, "teacher", weights=False).folder)
        work = planning.Workload(work.tokens, longest, held, reference=1, teacher=teacher or None)
    sharding = msgspec.structs.replace(chosen.sharding, mixed_precision=half)
    shape = planning.Model(folder, adapter_rank)
    found = planning.fit(shape, sharding, machine, work)
    if as_json:
        print_json({**plain(found), "fits": not found.problem})
    else:
        _show(found)
    if found.problem:
        raise typer.Exit(1)


@app.command("takeover")
@exits
@explained(__file__)
def takeover_command(
    home: Path,
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    trainer: str | None = None,
    force: bool = False,
) -> None:
    """Let a standby take the trainer's place, once the trainer is gone.

    The standby's process goes on from the newest policy as soon as it hears of it. A trainer that
    returns stops, and stands by when it is started again."""
    from peers.trainer.takeover import take_over
    from swarm.terminal.interrupt import run_until_interrupted

    home = home.expanduser()
    if not (home / "identity.key").exists():
        raise UserError(f"--home {home} has no identity.key; give the standby's home")
    run_until_interrupted(take_over, home, bootstrap or [], run, trainer, force)


def _show(found: MemoryPlan) -> None:
    print(
        numbered(f"{found.parameters:,} parameters on {found.ranks} ranks, passes of ")
        + f"{found.tokens:,} tokens; memory of one rank:"
    )
    for memory, title in (("device", "on the device"), ("host", "in main memory")):
        parts = fullest(found.parts, memory)
        if not parts:
            continue
        print(f"\n{title}, in its fullest phase")
        for part in parts:
            phase = "" if part.phase == "always" else f"  while {part.phase}"
            print(f"  {part.name:<42} {readable_bytes(part.bytes):>8}{phase}")
        print(f"  {'together':<42} {readable_bytes(total(parts)):>8}")
    print()
    print(f"it does not fit: {found.problem}" if found.problem else _verdict(found))


def _verdict(found: MemoryPlan) -> str:
    free = [
        f"{readable_bytes(limit - used)} {where}"
        for limit, used, where in (
            (found.device_limit, found.device_bytes, "of each device"),
            (found.host_limit, found.host_bytes, "of a machine's main memory"),
        )
        if limit
    ]
    return f"it fits, and leaves {' and '.join(free)}" if free else "no limit was given"
