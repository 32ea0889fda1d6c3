"""Examples to fine-tune on as token ids, from a data set or from an environment."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from blake3 import blake3

from peers.engines.config import read_config
from peers.engines.tokenizer import tokenizer_files
from peers.environments import Environment, Renderer, Task, task_of
from peers.environments.episodes import demonstrate
from peers.environments.interface import Conversation
from peers.environments.rows import Rows
from peers.learning.data_files import cached, fetch, find_files, make_room
from peers.learning.records import Chat, Record, Records, Sampled
from swarm.errors import DECODE_ERRORS, UserError
from swarm.jobs.offline import Reading
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.rollouts.seeds import digest
from swarm.world.disk import replace_file
from swarm.world.progress import report

FORMAT = "swarm-examples-1"
"""Of the files of encoded examples; another once the same rows give others."""

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
        """An example's episode; None: too long or without prompt; raises `UserError`."""
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
    examples: Iterable[Sequence[Record]], encoder: Encoder
) -> tuple[list[list[Rollout]], int]:
    """Each example's episodes, two of a pair, and how many were left out; raises `UserError`."""
    found, left_out = [], 0
    for example in examples:
        report()
        encoded = [encoder.encode(each) for each in example]
        whole = [each for each in encoded if each is not None]
        if len(whole) == len(encoded):
            found.append(whole)
        else:
            left_out += 1
    return found, left_out


def read_examples(
    data: str | Path, model: Path, tokens_max: int, reading: Reading, *, pairs: bool = False
) -> tuple[list[list[Rollout]], int, int]:
    """As `encode_examples`, of a data set, through the cache; also the answers refused."""
    files = find_files(str(data), reading.split, reading.subset)

    def make(path: Path) -> None:
        encoder = Encoder(model, tokens_max)
        records = Records(Rows(list(fetch(files)), str(data)), reading, encoder.renderer)
        examples = records.pairs() if pairs else ((each,) for each in records)
        found, left_out = encode_examples(examples, encoder)
        raw = msgspec.msgpack.encode((found, left_out, records.unwanted))
        make_room(len(raw))
        replace_file(path, raw)

    key = tokenizer_key(model, FORMAT, tokens_max, pairs, reading)
    path = cached(files, key, ".examples", make)
    try:
        read: _Read = msgspec.msgpack.decode(path.read_bytes(), type=_Read)
    except (FileNotFoundError, *DECODE_ERRORS):  # deleted since to make room, or damaged
        path.unlink(missing_ok=True)
        return read_examples(data, model, tokens_max, reading, pairs=pairs)
    return read


_Read = tuple[list[list[Rollout]], int, int]


def tokenizer_key(model: Path, *others: object) -> str:
    """A text that is another one once a model encodes texts in another way, or `others` change."""
    hasher = blake3(repr((stop_id(model), read_config(model)["vocab_size"], *others)).encode())
    for path in tokenizer_files(model):
        hasher.update(path.name.encode() + path.read_bytes())
    return hasher.hexdigest()


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
