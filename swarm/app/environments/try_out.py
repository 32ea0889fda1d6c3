"""`swarm environment try`: a few rollouts of a policy, as a reader wants to see them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from swarm.app.rollouts.screen import GROUP_MARK, turn_lines
from swarm.app.rollouts.seen import Turn
from swarm.jobs.evaluation import (
    DrawTasks,
    EvaluationService,
    EvaluationSetup,
    PlayTasks,
    Sample,
    TasksDrawn,
)
from swarm.manifest import EnvironmentReference, Sampling
from swarm.rollouts.rollout import Kind
from swarm.world import client
from swarm.world.compute import LocalCompute

SERVICE = "peers.evaluation.service:EvaluationService"


@dataclass(frozen=True)
class Wanted:
    """What to play."""

    policy: Path
    environment: EnvironmentReference
    tasks: int
    samples: int
    temperature: float
    max_new_tokens: int
    """0: what the context length leaves."""
    seed: int
    step: int


async def play(wanted: Wanted) -> list[Sample]:
    """Samples of training tasks, task by task; raises `UserError`."""
    setup = EvaluationSetup(folder=str(wanted.policy), environments=[wanted.environment])
    async with LocalCompute().child(SERVICE, setup, name="environment") as child:
        drawn: TasksDrawn = await client(EvaluationService, child).draw(
            DrawTasks(
                split="train",
                seed=wanted.seed,
                step=wanted.step,
                tasks=wanted.tasks,
                max_new_tokens=wanted.max_new_tokens,
                stop_ids=[],
            )
        )
        job = PlayTasks(
            environment=0,
            rows=list(range(drawn.tasks[0] * wanted.samples)),
            sampling=Sampling(
                temperature=wanted.temperature,
                max_new_tokens=drawn.max_new_tokens,
                stop_ids=drawn.stop_ids,
                group_size=wanted.samples,
            ),
        )
        found = []
        async with child.stream("play", job, Sample) as samples:
            async for sample in samples:
                found.append(sample)
        return sorted(found, key=lambda sample: sample.row)


def lines(wanted: Wanted, samples: list[Sample], width: int | None) -> Iterator[Text]:
    """The lines of the samples; those of a task follow each other below its prompt."""
    name = f"{wanted.environment.name} {wanted.environment.version}"
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
