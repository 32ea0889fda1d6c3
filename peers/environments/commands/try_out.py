"""`swarm environment try`: a few rollouts of a policy, as a reader wants to see them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from peers.evaluation.options import Evaluation
from peers.evaluation.run import SERVICE, draw, play_rows
from swarm.jobs.evaluation import EvaluationSetup, Sample
from swarm.look.rollouts.screen import GROUP_MARK, turn_lines
from swarm.look.rollouts.seen import Turn
from swarm.rollouts.rollout import Kind
from swarm.world.compute import LocalCompute


async def play(policy: Path, wanted: Evaluation) -> list[Sample]:
    """Samples of the only environment, task by task; raises `UserError`."""
    [environment] = wanted.environments
    setup = EvaluationSetup(
        folder=str(policy), environments=[environment], allowed=(environment.name,)
    )
    async with LocalCompute().child(SERVICE, setup, name="environment") as child:
        drawn = await draw(child, wanted)
        rows = range(drawn.tasks[0] * wanted.samples)
        async with play_rows(child, wanted, drawn, 0, rows) as samples:
            found = [sample async for sample in samples]
    return sorted(found, key=lambda sample: sample.row)


def lines(wanted: Evaluation, samples: list[Sample], width: int | None) -> Iterator[Text]:
    """The lines of the samples; those of a task follow each other below its prompt."""
    [environment] = wanted.environments
    name = f"{environment.name} {environment.version}"
    for sample in samples:
        number = sample.row % wanted.samples
        if number == 0:
            yield Text(f"{GROUP_MARK} {name}  task {sample.row // wanted.samples}", "bold")
            yield from turn_lines(_turn("prompt", sample.turns[0]), width)
        parts = ", ".join(f"{part} {value:.4g}" for part, value in sorted(sample.parts.items()))
        reward = f"reward {sample.reward:.4g}" + (f" ({parts})" if parts else "")
        end = "stop" if sample.finished else "length"
        shown = f"   sample {number}  {reward}  {sample.tokens:,} tokens  {end}"
        yield Text(shown, "cyan")
        for index, text in enumerate(sample.turns[1:]):
            yield from turn_lines(_turn("environment" if index % 2 else "model", text), width)


def _turn(kind: Kind, text: str) -> Turn:
    return Turn(kind, [], text, None, None, (), in_loss=kind == "model")
