"""The messages between an environment of `verifiers` and the child process that plays it.

Each message is a frame: its length in 4 bytes, big endian, then msgpack. The owner asks, the child
answers each question once, in order.
"""

from __future__ import annotations

from typing import Any

import msgspec

FRAME_BYTES_MAX = 32 << 20
"""Longest message: a prompt or a transcript. A longer one is an error of the environment."""

LENGTH_BYTES = 4


class Said(msgspec.Struct, array_like=True, frozen=True):
    """A message of a conversation."""

    role: str
    content: str


class Open(msgspec.Struct, tag=True, frozen=True):
    """Load an environment. Answered by `Opened`."""

    package: str
    arguments: dict[str, Any]
    tasks_max: int
    """Tasks used of an environment that has more, or infinitely many."""


class Draw(msgspec.Struct, tag=True, frozen=True):
    """Open the episode of a task. Answered by `Drawn`."""

    task: int


class Step(msgspec.Struct, tag=True, frozen=True):
    """Answer the last of the model's texts. Answered by `Observed`."""

    task: int
    texts: list[str]


class Grade(msgspec.Struct, tag=True, frozen=True):
    """Play a whole episode and grade it. Answered by `Graded` or `Ungradable`."""

    task: int
    texts: list[str]
    finished: bool
    """Whether the last text ended by itself rather than at the length limit."""


class Opened(msgspec.Struct, tag=True, frozen=True):
    """Answers `Open`."""

    tasks: int
    package_version: str
    """Version of the distribution that the package belongs to; empty: it belongs to none."""
    verifiers_version: str


class Drawn(msgspec.Struct, tag=True, frozen=True):
    """Answers `Draw`: what the environment says before the model's first text."""

    messages: list[Said]
    answer: str
    """The expected answer if the task has one, else empty."""


class Observed(msgspec.Struct, tag=True, frozen=True):
    """Answers `Step`."""

    messages: list[Said]
    """What the environment says; empty: the episode is over."""


class Graded(msgspec.Struct, tag=True, frozen=True):
    """Answers `Grade`."""

    reward: float
    parts: dict[str, float]
    """Rewards and metrics by name, before their weights."""


class Ungradable(msgspec.Struct, tag=True, frozen=True):
    """Answers `Grade` when the reward cannot be known here."""

    reason: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Answers any request that the environment's code could not carry out."""

    reason: str


Request = Open | Draw | Step | Grade
Reply = Opened | Drawn | Observed | Graded | Ungradable | Failed

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """A message as a frame; raises `ValueError` when it is too long."""
    body = msgspec.msgpack.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes exceeds {FRAME_BYTES_MAX}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_request(body: bytes) -> Request:
    """Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    return _requests.decode(body)


def decode_reply(body: bytes) -> Reply:
    """Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    return _replies.decode(body)
