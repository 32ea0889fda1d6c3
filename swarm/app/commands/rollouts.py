"""`swarm rollouts`: read submission files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from swarm.app.exit import finish
from swarm.app.extras import require_extra
from swarm.app.options import AsJson
from swarm.app.output import plain, print_json
from swarm.untrusted import printable

TEXT_CHARACTERS_MAX = 100_000
"""Longest prompt or completion that is printed; longer ones are cut."""

app = typer.Typer(help="Read submission files.", no_args_is_help=True)


@app.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="Submission: a Parquet file of rollouts.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with tokenizer.json; without it, token ids are shown."),
    ] = None,
    groups: Annotated[int, typer.Option(help="Number of groups to show; 0 shows all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print a submission: its header, then each prompt with its completions."""

    def work() -> None:
        require_extra("infer", "swarm rollouts show")
        from swarm.rollouts.show import show as read_submission

        header, rows = read_submission(file, tokenizer)
        shown = [row for row in rows if not groups or row.group < groups]
        if as_json:
            completions = [dataclasses.asdict(row) for row in shown]
            print_json({"header": plain(header), "rows": completions})
            return
        for name, value in plain(header).items():
            print(f"{name:<20} {printable(str(value))}")
        group = -1
        for row in shown:
            if row.group != group:
                group = row.group
                target = f"  (target length {row.target_length})" if row.target_length else ""
                prompt = printable(row.prompt or str(row.prompt_tokens), TEXT_CHARACTERS_MAX)
                print(f"\ngroup {group}  {prompt}{target}")
            log_probability = sum(row.log_probabilities)
            print(
                f"  {row.sample:>3}  {len(row.completion_tokens):>5} tokens  "
                f"log p {log_probability:8.3f}  proof {row.proof_bytes} B  "
                f"{printable(row.completion or str(row.completion_tokens), TEXT_CHARACTERS_MAX)}"
            )

    finish(work)
