"""Examples to fine-tune on as token ids, from a data set or from an environment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from peers.engines.config import read_config
from peers.environments import Environment, Renderer, Task, task_of
from peers.environments.episodes import demonstrate
from peers.environments.interface import Conversation
from peers.environments.rows import Rows
from peers.learning.data_files import fetch, find_files
from peers.learning.records import Chat, Record, Records, Sampled
from swarm.errors import UserError
from swarm.jobs.offline import Reading
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.rollouts.seeds import digest

ENVIRONMENT_EXAMPLES_MAX = 100_000
"""Most examples drawn from an environment: a small environment repeats its prompts."""


class Encoder:
    """Makes token ids of examples, with the tokenizer of a model's folder."""

    def __init__(
        self, model: Path, tokens_max: int, environment: Environment | None = None
    ) -> None:
        """`environment` answers the demonstrations of several turns. Raises `UserError`."""
        self.renderer = Renderer(model)
        self.tokens_max = tokens_max
        self._environment = environment
        self._stop, self._vocabulary = stop_id(model), read_config(model)["vocab_size"]

    def encode(self, record: Record) -> Rollout | None:
        """An example's episode; None if it has an empty prompt or more than `tokens_max` tokens.

        Raises `UserError` for a token that the model does not have, for a chat that cannot be
        learned, and as `demonstrate` does.
        """
        segments = self._segments(record)
        if not segments[0].tokens:
            return None
        rollout = Rollout(segments)
        outside = [token for token in rollout.tokens if token >= self._vocabulary]
        if outside:
            raise UserError(
                f"an example has the token {outside[0]}, but the model's vocabulary has "
                f"{self._vocabulary} tokens; remove the special token from the text"
            )
        return rollout if len(rollout.tokens) <= self.tokens_max else None

    def _segments(self, record: Record | Rollout) -> Sequence[Segment]:
        if isinstance(record, Sampled):
            record = record.example
        if isinstance(record, Rollout):
            return record.segments
        if isinstance(record, Chat):
            return _conversation(record, self.renderer, self._stop)
        ends = self._stop
        if not isinstance(record.prompt, str):
            ends = self.renderer.turn_end(record.prompt) or ends
        return demonstrate(self._environment, record, self.renderer, ends)


def _conversation(chat: Chat, renderer: Renderer, stop: int) -> list[Segment]:
    """The segments of a chat, in which the model writes the messages of the role `assistant`."""
    messages = chat.messages
    turns = [index for index, each in enumerate(messages) if each.role == "assistant"]
    if not turns or 0 in turns or any(b - a == 1 for a, b in pairwise(turns)):
        raise UserError(
            f"a chat has the roles {', '.join(each.role for each in messages)[:80]}; it needs "
            "messages of the role assistant, none of them first or next to another"
        )
    prompt = Conversation(messages[: turns[0]])
    end = renderer.turn_end(prompt) or stop
    segments = [Segment("prompt", renderer.encode_prompt(prompt))]
    for at, after in zip(turns, [*turns[1:], len(messages)], strict=True):
        written = [*renderer.encode_completion(messages[at].content), end]
        span = Span(policy=0, tokens=len(written))
        segments.append(Segment("model", written, "stop", spans=[span]))
        if after < len(messages):
            observed = renderer.encode_observation(prompt, messages[at + 1 : after], end)
            segments.append(Segment("environment", observed))
    return segments


def encode_examples(
    records: Iterable[Record], model: Path, tokens_max: int, environment: Environment | None = None
) -> tuple[list[Rollout], int]:
    """The episodes of examples, and how many were left out; raises `UserError` as `Encoder` does"""
    encoder = Encoder(model, tokens_max, environment)
    encoded = [encoder.encode(record) for record in records]
    found = [rollout for rollout in encoded if rollout is not None]
    return found, len(encoded) - len(found)


def rows_of(data: str, split: str | None) -> Rows:
    """The rows of a data set, here or at an address; raises `UserError`."""
    return Rows(list(fetch(find_files(data, split))), data)


def read_examples(
    data: str | Path, model: Path, tokens_max: int, reading: Reading
) -> tuple[list[Rollout], int, int]:
    """As `encode_examples`, of a data set; also how many answers of policies were refused or have a
    reward out of bounds. Raises `UserError`."""
    records = Records(rows_of(str(data), reading.split), reading, Renderer(model))
    return *encode_examples(records, model, tokens_max), records.unwanted


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
