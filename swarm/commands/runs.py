"""`swarm run list`: the runs of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swarm.terminal.exit import exits
from swarm.terminal.figures import DIM, readable_bytes
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import AsJson, Bootstrap
from swarm.terminal.output import print_json, print_lines
from swarm.terminal.untrusted import printable

if TYPE_CHECKING:
    from rich.text import Text

    from swarm.look.networks import Listed

HEADS = ("NAME", "OWNER", "MODEL", "ENVIRONMENTS", "STEP", "PEERS", "ADMISSION", "POLICY")

CELL_CHARACTERS_MAX = 32
"""Longest text of a run's owner in a column: a name, a model, environments."""


@exits
def runs(bootstrap: Bootstrap = None, as_json: AsJson = False) -> None:
    """List the runs of a network: progress, peers, who may join, what a policy weighs."""
    from swarm.look.networks import runs_of

    found = run_until_interrupted(runs_of, bootstrap, waiting="asking each run's trusted peers")
    if as_json:
        print_json([run_object(each) for each in found])
        return
    from rich.console import Console

    console = Console()
    print_lines(table(found, console.width if console.is_terminal else None), console)


def run_object(listed: Listed) -> dict[str, Any]:
    """Convert a run to plain data. Unknown figures are None: its trusted peers do not answer."""
    run, status = listed.run, listed.status
    manifest = run.manifest
    order = status.order if status else None
    checkpoint = status.checkpoint if status else None
    standings = [each.standing for each in status.present.values()] if status else None
    return {
        "run": run.id,
        "owner": run.owner,
        "name": manifest.name,
        "version": manifest.version,
        "model": manifest.model,
        "environments": [each.name for each in manifest.environments],
        "answers": status is not None,
        "over": bool(order and order.final),
        "step": order.step if order else None,
        "steps": manifest.schedule.steps,
        "peers": standings.count("live") if standings is not None else None,
        "admission": manifest.admissions.policy,
        "policy_bytes": checkpoint.total_bytes if checkpoint else None,
        "protocol": manifest.needs,
        "tokens_max": manifest.sampling.max_new_tokens,
    }


def table(found: Sequence[Listed], width: int | None = None) -> list[Text]:
    """Format the runs in columns, with the complete id of each below, to be copied; one below the
    other if the columns need more than `width`."""
    from rich.text import Text

    if not found:
        return [Text("the bootstrap peers know no run")]
    rows = [_cells(run_object(each)) for each in found]
    widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, widths, strict=True)
        return "  ".join(f"{cell:<{width}}" for cell, width in columns).rstrip()

    narrow = width is not None and sum(widths) + 2 * len(widths) - 2 > width
    lines = [] if narrow else [Text(line(HEADS), style="bold")]
    for each, cells in zip(found, rows, strict=True):
        if narrow:
            facts = zip(HEADS[1:], cells[1:], strict=True)
            lines.append(Text(cells[0], style="bold"))
            lines.append(Text(" · ".join(f"{head.lower()} {cell}" for head, cell in facts)))
        else:
            lines.append(Text(line(cells)))
        lines.append(Text(f"  {each.run.id}", style=DIM))
    return lines


def _cells(told: dict[str, Any]) -> tuple[str, ...]:
    if not told["answers"]:
        step = "no answer"
    elif told["over"]:
        step = "over"
    else:
        step = "not begun" if told["step"] is None else f"{told['step']} of {told['steps']}"
    return (
        printable(told["name"], CELL_CHARACTERS_MAX),
        f"…{told['owner'][-8:]}",
        printable(told["model"], CELL_CHARACTERS_MAX),
        printable(", ".join(told["environments"]), CELL_CHARACTERS_MAX),
        step,
        "–" if told["peers"] is None else str(told["peers"]),
        told["admission"],
        "–" if told["policy_bytes"] is None else readable_bytes(told["policy_bytes"]),
    )
