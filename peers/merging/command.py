"""`swarm checkpoint merge`."""

from pathlib import Path

from peers.models.find import FORMS, find_model
from swarm.errors import UserError
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.options import AsJson, explained
from swarm.terminal.output import print_json
from swarm.terminal.progress import progress_bar


@exits
@explained(__file__, FORMS=FORMS)
def merge_checkpoints(
    checkpoints: list[str],
    out: Path,
    weight: list[float] | None = None,
    method: str = "linear",
    base: str | None = None,
    density: float = 0.5,
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
