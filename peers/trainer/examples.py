"""Examples to fine-tune on: prompts with answers, from a file or from an environment."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from peers.engines.config import read_config
from peers.environments import Environment, Renderer, Task, task_of
from peers.environments.episodes import demonstrate
from swarm.errors import UserError
from swarm.rollouts.rollout import Rollout
from swarm.rollouts.seeds import digest

LINE_BYTES_MAX = 16 << 20
"""Longest line of an example file."""

ENVIRONMENT_EXAMPLES_MAX = 100_000
"""Most examples drawn from an environment: a small environment repeats its prompts."""


def encode_examples(
    tasks: Iterable[Task], model: Path, tokens_max: int, environment: Environment | None = None
) -> tuple[list[Rollout], int]:
    """Tokenize tasks and their answers with the tokenizer of the Hugging Face folder `model`.

    `environment` answers the tasks' demonstrations of several turns. Returns episodes and how many
    tasks were left out: those longer than `tokens_max`, or with an empty prompt. Raises `UserError`
    for a token that the model does not have, and as `demonstrate` does.
    """
    renderer = Renderer(model)
    stop, vocabulary = stop_id(model), read_config(model)["vocab_size"]
    found: list[Rollout] = []
    left_out = 0
    for task in tasks:
        ends = stop if isinstance(task.prompt, str) else renderer.turn_end(task.prompt) or stop
        segments = demonstrate(environment, task, renderer, ends)
        if not segments[0].tokens:
            left_out += 1
            continue
        rollout = Rollout(segments)
        outside = [token for token in rollout.tokens if token >= vocabulary]
        if outside:
            raise UserError(
                f"an example has the token {outside[0]}, but the model's vocabulary has "
                f"{vocabulary} tokens; remove the special token from the text"
            )
        if len(rollout.tokens) <= tokens_max:
            found.append(rollout)
        else:
            left_out += 1
    return found, left_out


def epochs(examples: Sequence[Rollout], seed: int) -> Iterator[Rollout]:
    """Yield all examples for ever, each epoch in its own random order."""
    for epoch in itertools.count():
        order = list(range(len(examples)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for index in order:
            yield examples[index]


def stop_id(folder: Path) -> int:
    """Id of the token that ends an answer, from the model's config; raises `UserError`."""
    found = read_config(folder).get("eos_token_id")
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, int):
        raise UserError(
            f"model config {folder / 'config.json'}: eos_token_id is {found!r}; it must be the id "
            "of the token that ends an answer"
        )
    return found


def read_tasks(path: Path) -> Iterator[Task]:
    """Read a task from each line of a JSONL file; raises `UserError` with the line."""
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(LINE_BYTES_MAX + 1)
                if not line:
                    return
                if not line.strip():
                    continue
                yield _task(line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error


def _task(line: bytes, where: str) -> Task:
    if len(line) > LINE_BYTES_MAX:
        raise UserError(f"{where} has more than {LINE_BYTES_MAX} bytes")
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f'{where} is not an object with "prompt" and "answer"')
    for key in ("prompt", "answer"):
        if not isinstance(row.get(key), str):
            raise UserError(f"{where}: {key} is {row.get(key)!r}; it must be text")
    return Task(row["prompt"], row["answer"])


def draw_tasks(environment: Environment, count: int, seed: int) -> Iterator[Task]:
    """Draw up to `count` training tasks with distinct prompts."""
    wanted = min(ENVIRONMENT_EXAMPLES_MAX, count)
    seen = set()
    for index in range(2 * wanted):
        drawn = seed.to_bytes(8, "big") + index.to_bytes(8, "big")
        task = task_of(environment, digest("swarm/1/sft-example", drawn))
        if task.prompt in seen:
            continue
        seen.add(task.prompt)
        yield task
        if len(seen) >= wanted:
            return
