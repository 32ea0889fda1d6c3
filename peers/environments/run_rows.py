"""The look at every row of a run's data sets before its manifest is signed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from peers.environments import Renderer
from peers.environments.collection import Environments, room_for
from peers.environments.model_facts import ModelFacts
from peers.environments.play import indexed_tasks
from peers.environments.prompt_room import PromptRoom
from peers.environments.row_check import RowsRead, read_rows
from swarm.errors import UserError
from swarm.terminal.progress import counting_bar
from swarm.wire.manifest import EnvironmentReference, RunManifest


@dataclass
class DataRead:
    """What `check_rows` has to say once the run is found possible."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_rows(
    manifest: RunManifest, folder: Path, installed: Environments, unusable_max: float
) -> DataRead:
    """Render every row of the run's data sets with the tokenizer in `folder`.

    Warnings name the rows that no rollout can be made of; a worker that draws one draws another.
    Raises `UserError` if they are more than the share `unusable_max`.
    """
    room = policy_room(manifest, folder, Renderer(folder))
    read = DataRead()
    for reference in manifest.environments:
        tasks = indexed_tasks(installed.of(reference))
        if tasks is None:
            continue
        with counting_bar(f"rendering the rows of {reference.name}") as show:
            found = read_rows(tasks, room_for(reference, room), show)
        rate = f" ({found.seconds / found.rows * 1000:.2g} s per thousand)"
        read.lines.append(
            f"{reference.name}: {found.rows:,} rows rendered in {found.seconds:.1f} s"
            f"{rate if found.rows >= 1000 else ''}; the longest prompt has "
            f"{found.tokens_max:,} tokens"
        )
        read.warnings += _judged(found, reference, manifest, unusable_max)
    return read


def policy_room(manifest: RunManifest, folder: Path, renderer: Renderer) -> PromptRoom:
    """Room for the prompts of a run; of any length if `folder` has no config.json."""
    if not (folder / "config.json").exists():
        return PromptRoom(renderer)
    positions = ModelFacts.read(folder).max_position_embeddings
    return PromptRoom.of_policy(renderer, positions, manifest.sampling.max_new_tokens)


def _judged(
    found: RowsRead, reference: EnvironmentReference, manifest: RunManifest, unusable_max: float
) -> list[str]:
    bad = found.unusable_count
    if not bad:
        return []
    counted = found.counted(reference.name)
    if bad > unusable_max * found.rows:
        raise UserError(
            f"{counted}, more than the share --unusable-max {unusable_max:g}. "
            f"{found.unusable[0]}. Repair or remove such rows, make sampling.max_new_tokens "
            f"({manifest.sampling.max_new_tokens}) smaller if prompts are too long, or raise "
            "--unusable-max"
        )
    return [f"{counted}; a worker that draws one draws another:{found.listed()}"]
