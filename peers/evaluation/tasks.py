"""The tasks of an evaluation, by environment, split and seed only, and a checkpoint's hash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import blake3

from peers.engines.model import weight_files
from peers.environments import Environment, Renderer, Task, load, task_of
from peers.environments.interface import Prompt, Split
from peers.environments.prompt_room import ModelFacts, PromptRoom
from swarm.rollouts.seeds import digest

if TYPE_CHECKING:
    from peers.evaluation.run import Evaluation

REPEATS_FACTOR = 20
REPEATS_MIN = 200
"""An environment is taken to have no further task after `REPEATS_MIN` + `REPEATS_FACTOR` · n
repeated ones in a row, of n found. One more, as likely, is missed with probability e⁻²⁰."""


def evaluation_seed(split: Split, seed: int = 0) -> bytes:
    """The seed of all tasks and of the noise of an evaluation."""
    return digest("swarm/1/evaluation", seed.to_bytes(8, "big"), split.encode())


def seeds_of_tasks(drawn: bytes) -> Iterator[bytes]:
    """Endless seeds of tasks, of an evaluation's seed."""
    index = 0
    while True:
        yield digest("swarm/1/evaluation-task", drawn, index.to_bytes(4, "big"))
        index += 1


def different_tasks(
    environment: Environment, split: Split, seed: int, count: int, *, room: PromptRoom | None = None
) -> Iterator[tuple[bytes, Task]]:
    """The first `count` tasks, or all, of different prompts that `room` takes, and their seeds."""
    known: set[Prompt] = set()
    repeated = 0
    for each in seeds_of_tasks(evaluation_seed(split, seed)):
        if len(known) >= count or repeated >= REPEATS_MIN + REPEATS_FACTOR * len(known):
            return
        task = task_of(environment, each, split, room=room)
        repeated = repeated + 1 if task.prompt in known else 0
        if not repeated:
            known.add(task.prompt)
            yield each, task


def tasks_of(wanted: Evaluation, policy: Path) -> Iterator[Iterator[tuple[bytes, Task]]]:
    """The seeds and tasks of each environment that an evaluation drew; raises `UserError`."""
    positions = ModelFacts.read(policy).max_position_embeddings
    room = PromptRoom.of_policy(Renderer(policy), positions, max(1, wanted.max_new_tokens))
    for each in wanted.environments:
        environment = load(each.name, each.version, each.options)
        yield different_tasks(environment, wanted.split, wanted.seed, wanted.tasks, room=room)


NAMED = ("config.json", "tokenizer.json", "adapter_config.json")
"""Files that change what a checkpoint answers, beside its weights."""


def checkpoint_hash(folder: Path) -> str:
    """BLAKE3-256 of weights, config and tokenizer, hex; of an adapter its base counts too. Raises
    `UserError` for a folder without weights."""
    own = [folder / name for name in NAMED if (folder / name).exists()]
    files = {
        path.resolve(): path for path in [*weight_files(folder), *folder.glob("*.safetensors")]
    }
    hasher = blake3.blake3()
    for path in [*own, *(files[key] for key in sorted(files, key=lambda key: key.name))]:
        each = blake3.blake3()
        each.update_mmap(path)
        hasher.update(path.name.encode() + b"\0" + each.digest())
    return hasher.hexdigest()
