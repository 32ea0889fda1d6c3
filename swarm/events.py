"""Structured events: a name and fields, no prose. Logs, metrics, dashboard and tests read them.

A room emits; sinks decide what becomes of it: a line for a person, a JSON line for a machine, a
counter, an assertion.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from swarm.world import World


@dataclass(frozen=True)
class Event:
    name: str
    """`room.what_happened`, in the past tense: `shardcast.piece_refused`."""
    wall_time: float
    peer: str
    fields: dict[str, Any]


Sink = Callable[[Event], None]


class Events:
    """One peer's stream of events. Sinks are called at once, in order; they must not block."""

    def __init__(self, world: World, peer: str) -> None:
        self._world = world
        self.peer = peer
        self._sinks: list[Sink] = []

    def add_sink(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def emit(self, name: str, /, **fields: Any) -> None:
        """Say that something happened. Values: text, numbers, booleans, lists of them; bytes
        are shown in hex."""
        event = Event(name, self._world.wall_time(), self.peer, fields)
        for sink in self._sinks:
            sink(event)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def to_json(event: Event) -> str:
    """One line of JSON: event, time, peer, then the fields."""
    return json.dumps(
        {"event": event.name, "time": round(event.wall_time, 3), "peer": event.peer}
        | {name: _plain(value) for name, value in event.fields.items()}
    )


class JsonLines:
    """A sink that writes a JSON line per event (`--json-logs`)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def __call__(self, event: Event) -> None:
        print(to_json(event), file=self._stream, flush=True)


def _readable(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()[:12]
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


class Lines:
    """A sink that writes a short line per event for a person.

    Names in `quiet` prefixes are left out unless `verbose`.
    """

    QUIET = ("dht.", "gossip.", "transport.", "shardcast.piece", "membership.heartbeat")

    def __init__(self, stream: TextIO | None = None, *, verbose: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._verbose = verbose

    def __call__(self, event: Event) -> None:
        if not self._verbose and event.name.startswith(self.QUIET):
            return
        fields = " ".join(f"{name}={_readable(value)}" for name, value in event.fields.items())
        print(f"{event.name} {fields}".rstrip(), file=self._stream, flush=True)
