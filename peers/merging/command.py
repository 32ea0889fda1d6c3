"""`swarm checkpoint merge`."""

from pathlib import Path
from typing import Annotated

import typer

from peers.models.find import FORMS, find_model
from swarm.errors import UserError
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
    weight: Annotated[
        list[float] | None,
        typer.Option(help="Weight of a checkpoint; once for each, in order. Default: all equal."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="linear: their mean; or slerp, task_arithmetic, ties, dare_linear, "
            "dare_ties, model_stock, by mergekit."
        ),
    ] = "linear",
    base: Annotated[
        str | None, typer.Option(help="The checkpoint that all of them were trained from.")
    ] = None,
    density: Annotated[
        float, typer.Option(help="Share of each checkpoint's changes that TIES and DARE keep.")
    ] = 0.5,
    as_json: AsJson = False,
) -> None:
    """Merge checkpoints of one architecture and tokenizer, tensor by tensor.

    Memory holds one file of the result."""
    require_extra("infer", "swarm checkpoint merge")
    from peers.merging.merge import Method, Recipe, merge

    if method not in list(Method):
        raise UserError(f"--method is {method!r}; it must be one of {', '.join(Method)}")
    if method != Method.linear:
        require_extra("merge", f"--method {method}")
    recipe = Recipe(
        [find_model(each, "CHECKPOINTS").folder for each in checkpoints],
        weight or (),
        Method(method),
        find_model(base, "--base").folder if base is not None else None,
        density,
    )
    with progress_bar("merging") as progress:
        merged = merge(recipe, out, progress)
    if as_json:
        print_json({"folder": str(out), "parameters": merged.parameters, "bytes": merged.bytes})
    else:
        print(f"{out}: {merged.parameters:,} parameters, {merged.bytes:,} bytes")
