"""`swarm judge`: a judge of this machine, its hash for run.toml, and a trial."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.terminal.exit import exits
from swarm.terminal.options import AsJson
from swarm.terminal.output import print_json


@exits
def judge(
    name: Annotated[str, typer.Argument(help="Name of the judge: NAME.toml in its folder.")],
    completion: Annotated[
        str | None, typer.Option(help="Let it judge this text of the model, too.")
    ] = None,
    task: Annotated[str, typer.Option(help="The prompt that the text answers.")] = "",
    answer: Annotated[str, typer.Option(help="The task's right answer.")] = "",
    as_json: AsJson = False,
) -> None:
    """Check a judge's file, print the hash for run.toml, and try the judge."""
    from peers.environments import Task, Transcript
    from peers.environments.judges.definition import read_definition
    from peers.environments.judges.judge import Judge

    definition, access, path = read_definition(name)
    digest = definition.digest().hex()
    reward = None
    if completion is not None:
        opened = Judge.open(name, digest, 0)
        reward = opened.score(Task(task, answer), Transcript.of(completion), 0)
    if as_json:
        print_json({"name": name, "file": str(path), "judge_hash": digest, "reward": reward})
        return
    print(f"{path}: {definition.kind} {definition.model} at {access.url}")
    print(f'judge = "{name}", judge_hash = "{digest}"')
    if reward is not None:
        print(f"reward {reward:g}")
