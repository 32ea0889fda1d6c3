"""The exchange folder's files (`swarm.jobs.merging_exchange` has its layout).

Snapshots are Hugging Face folders in fp32; answers are safetensors with a change of each weight.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from peers.learning.stored import StoredPart, StoredWeights
from swarm.errors import UserError
from swarm.jobs.training import ExchangeSeen
from swarm.world.progress import report

VERSION = 1

GREETING = "replica.json"
SNAPSHOT, ANSWER = "snapshot", "answer"
FACTS = "exchange.json"
"""Name of the facts in the folder of a snapshot or an answer."""


class Greeting(msgspec.Struct, frozen=True):
    """The replica's file."""

    inner_steps: int
    number: int
    """The highest number of a snapshot that the replica knows."""
    version: int = VERSION


class Base(msgspec.Struct, frozen=True):
    """What policy 0 was, in hexadecimal digests."""

    weights: str
    tokenizer: str


class SnapshotFacts(msgspec.Struct, frozen=True):
    number: int
    adopted: int
    steps: int
    base: Base
    version: int = VERSION


class AnswerFacts(msgspec.Struct, frozen=True):
    number: int
    problem: str = ""
    """Why the snapshot was not merged."""
    round: int = 0
    trainers: int = 0
    norm: float = 0.0
    changes: bool = False
    """Whether the folder has a change; it has none if nobody else contributed."""
    version: int = VERSION


T = TypeVar("T", Greeting, SnapshotFacts, AnswerFacts)


def folder_of(exchange: Path, kind: str, number: int) -> Path:
    return exchange / f"{kind}-{number}"


def numbers(exchange: Path, kind: str) -> list[int]:
    """Numbers of the complete folders of a kind, ascending."""
    found = (path.name.removeprefix(f"{kind}-") for path in exchange.glob(f"{kind}-*"))
    return sorted(int(each) for each in found if each.isdigit())


def read_facts(path: Path, kind: type[T]) -> T:
    """Raises `UserError` for a file that is missing, broken, or of another version."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    if found.version != VERSION:
        raise UserError(
            f"{path} has version {found.version}, but this program exchanges version {VERSION}; "
            "run trainer and replica with the same version of Swarm"
        )
    return found


def write_facts(facts: Greeting | SnapshotFacts | AnswerFacts, path: Path) -> None:
    path.write_bytes(msgspec.json.encode(facts))


@functools.lru_cache(maxsize=4)
def base_of(folder: Path) -> Base:
    """Digests of a model's weights, whatever their files, and of its tokenizer."""
    stored, weights = StoredWeights(folder), blake3()
    for name, shape in sorted(stored.shapes.items()):
        report()
        value = stored.part(name, tuple(slice(None) for _ in shape)).contiguous()
        weights.update(f"{name} {value.dtype} {shape}".encode())
        weights.update(value.reshape(-1).view(torch.uint8).numpy().data)
    path = folder / "tokenizer.json"
    tokenizer = blake3(path.read_bytes() if path.exists() else b"")
    return Base(weights.hexdigest(), tokenizer.hexdigest())


def look(exchange: Path) -> ExchangeSeen:
    """What the RL trainer can see; a folder without a replica is empty to it."""
    try:
        greeting = read_facts(exchange / GREETING, Greeting)
    except UserError:
        return ExchangeSeen()
    answers = numbers(exchange, ANSWER)
    return ExchangeSeen(
        inner_steps=greeting.inner_steps,
        highest=max([greeting.number, *answers, *numbers(exchange, SNAPSHOT)]),
        answers=answers,
    )


def tidy(exchange: Path, number: int) -> None:
    """Delete snapshots and answers up to a number."""
    for kind in (SNAPSHOT, ANSWER):
        for each in numbers(exchange, kind):
            if each <= number:
                shutil.rmtree(folder_of(exchange, kind, each), ignore_errors=True)


def read_change(
    exchange: Path, number: int, parameters: Mapping[str, Tensor]
) -> tuple[AnswerFacts, Mapping[str, Tensor]]:
    """An answer's facts, and its change of this rank's part of each parameter, fp32.

    Raises `UserError` if a tensor is missing, has another shape, or a value that is not finite.
    """
    folder = folder_of(exchange, ANSWER, number)
    facts = read_facts(folder / FACTS, AnswerFacts)
    if facts.problem:
        raise UserError(facts.problem)
    if not facts.changes:
        return facts, {}
    stored = StoredWeights(folder)
    for name, parameter in parameters.items():
        if stored.shapes.get(name) != tuple(parameter.shape):
            raise UserError(
                f"{folder} is of another model: {name} has shape {stored.shapes.get(name)}, not "
                f"{tuple(parameter.shape)}"
            )
    change = StoredPart(stored, parameters, torch.float32)
    for name in parameters:
        report()
        if not bool(change[name].isfinite().all()):
            raise UserError(f"{folder}: {name} has a value that is not finite")
    return facts, change
