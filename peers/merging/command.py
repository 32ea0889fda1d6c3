"""`swarm checkpoint merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peers.models.find import FORMS, find_model
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.options import AsJson
from swarm.terminal.output import print_json
from swarm.terminal.progress import progress_bar


@exits
def merge_checkpoints(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help=f"Checkpoints to merge, each {FORMS}; an adapter counts with its base."
        ),
    ],
    out: Annotated[Path, typer.Option(help="New folder for the result.")],
    method: Annotated[
        str, typer.Option(help="linear: mean; slerp: along the arc between two; ties: see --base.")
    ] = "linear",
    weight: Annotated[
        list[float] | None,
        typer.Option(help="Weight of a checkpoint; once for each, in order. Default: all equal."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="ties: the checkpoint that the others were trained from."),
    ] = None,
    density: Annotated[
        float, typer.Option(help="ties: share of each checkpoint's largest changes that stays.")
    ] = 0.2,
    scale: Annotated[float, typer.Option(help="ties: factor of the merged change.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Merge checkpoints of one architecture and tokenizer, tensor by tensor.

    Memory holds one file of the result.
    """
    require_extra("infer", "swarm checkpoint merge")
    from peers.merging.merge import Recipe, merge

    recipe = Recipe(
        folders=[find_model(each, "CHECKPOINTS").folder for each in checkpoints],
        method=method,
        weights=weight or (),
        base=None if base is None else find_model(base, "--base").folder,
        density=density,
        scale=scale,
    )
    with progress_bar("merging") as progress:
        merged = merge(recipe, out, progress)
    if as_json:
        print_json({"folder": str(out), "parameters": merged.parameters, "bytes": merged.bytes})
    else:
        print(f"{out}: {method} merge, {merged.parameters:,} parameters, {merged.bytes:,} bytes")
